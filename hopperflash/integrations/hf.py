"""Attention "hopperflash" in Hugging Face transformers; importing this registers it.

import hopperflash.integrations.hf
model = AutoModel.from_pretrained(..., attn_implementation="hopperflash", dtype=torch.bfloat16)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache, wraps
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, modeling_utils

from hopperflash import env
from hopperflash.api import WindowSize, flash_attn_func, flash_attn_varlen_func
from hopperflash.errors import UnsupportedProblem
from hopperflash.integrations.hf_mask import attention_mask as two_dimensional_mask
from hopperflash.integrations.hf_rows import Rows, documents_of, rows_of
from hopperflash.runtime.log import logger

NAME = "hopperflash"

_BIAS = "it is added to the scores, which the kernels do not take"
# Keywords that change what attention computes. What is in none of these lists does not.
_REFUSED = {
    "s_aux": "attention sinks are not computed",
    "sinks": "attention sinks are not computed",
    "learnable_sink": "attention sinks are not computed",
    "position_bias": _BIAS,
    "relative_position_bias": _BIAS,
    "attention_bias": _BIAS,
    "alibi": _BIAS,
    "head_mask": "heads are not masked",
    "indices": "a choice of keys (sparse attention) is not computed",
    "block_indices": "a choice of keys (sparse attention) is not computed",
    "block_table": "a paged KV cache is not read",
}
_HALVES = (torch.bfloat16, torch.float16)


def attention_forward(  # noqa: PLR0913, PLR0917 - transformers' signature
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention of one layer, as transformers calls it.

    Args:
        module: the layer; says whether it is causal where `is_causal` does not.
        query: (batch, heads_q, queries, head_dim), fp16 or bf16; fp32 is cast inside
            torch.autocast, and to the layer's weights where those are fp16 or bf16.
        key, value: (batch, heads_k, keys, ...) of these tokens and of those in the KV cache.
        attention_mask: None, or (batch, keys), 0 where padded: see `hf_mask` and `hf_rows`.
        sliding_window: how many keys a causal query sees; one that is not causal sees
            sliding_window - 1 to either side.
        kwargs: `cu_seq_lens_q` and `cu_seq_lens_k` of sequences packed in one batch row;
            `position_ids`, which start documents where they fall back; `deterministic`.

    Returns:
        out (batch, queries, heads_q, head_dim_v), and None for the weights, which nothing holds.

    Raises:
        UnsupportedProblem: lists what the model asks for and the kernels do not compute.
    """
    keys = key.shape[2]
    _refuse(module, query, keys, attention_mask, {**kwargs, "dropout": dropout, "s_aux": s_aux})
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", True))
    window: WindowSize = (-1, -1)
    if sliding_window is not None:
        window = (sliding_window - 1, sliding_window - 1)
    deterministic = kwargs.get("deterministic")
    options: dict[str, Any] = {
        "softmax_scale": scaling,
        "causal": is_causal,
        "window_size": window,
        "softcap": softcap or 0.0,
        "deterministic": env.flash_attention_deterministic()
        if deterministic is None
        else deterministic,
    }
    q, k, v = (x.transpose(1, 2) for x in _in_half(module, query, key, value))
    aligned = sliding_window is not None or (is_causal and q.shape[1] > 1)
    rows = _rows(q, k, attention_mask, aligned, kwargs)
    if rows is None:
        return _output(flash_attn_func(q, k, v, **options)), None
    rows_q, rows_k = rows
    if attention_mask is not None and attention_mask.shape[1] < k.shape[1]:
        k, v = (x[:, : attention_mask.shape[1]] for x in (k, v))  # the rest a static cache holds
    out = flash_attn_varlen_func(
        rows_q.taken(q),
        rows_k.taken(k),
        rows_k.taken(v),
        rows_q.cu_seqlens,
        rows_k.cu_seqlens,
        q.shape[1],
        k.shape[1],
        seqused_q=rows_q.seqused,
        seqused_k=rows_k.seqused,
        **options,
    )
    return rows_q.put_back(_output(out), *q.shape[:2]), None


def _rows(
    q: Tensor, k: Tensor, mask: Tensor | None, aligned: bool, kwargs: Mapping[str, Any]
) -> tuple[Rows, Rows] | None:
    """The rows of sequences, by what says most about them; None where all rows of a batch are."""
    offsets = kwargs.get("cu_seq_lens_q"), kwargs.get("cu_seq_lens_k")
    if offsets[0] is not None and offsets[1] is not None:
        return Rows(offsets[0]), Rows(offsets[1])
    positions = kwargs.get("position_ids")
    batch, queries = q.shape[:2]
    if (
        mask is None
        and isinstance(positions, Tensor)
        and positions.dim() == 2
        and 1 < queries == k.shape[1] == positions.shape[1]
    ):
        mask = documents_of(positions, batch)
    return None if mask is None else rows_of(mask, queries, aligned)


def _refuse(
    module: nn.Module, query: Tensor, keys: int, mask: Tensor | None, keywords: Mapping[str, Any]
) -> None:
    """Raises with everything that is asked for and not computed, or would be ignored."""
    reasons = [
        f"{name} is given: {reason}"
        for name, reason in _REFUSED.items()
        if keywords.get(name) is not None
    ]
    if keywords["dropout"]:
        reasons.append(
            f"attention dropout is {keywords['dropout']}: there is none; set attention_dropout"
            " (attention_probs_dropout_prob in BERT's family) to 0 in the model's config"
        )
    if keywords.get("output_attentions"):
        reasons.append("output_attentions is set: attention weights are never in memory")
    if mask is not None and mask.dim() != 2:
        reasons.append(
            f"attention_mask has shape {tuple(mask.shape)}: give (batch, keys); arbitrary masks are"
            " for attn_implementation='sdpa' or 'flex_attention'"
        )
    elif mask is not None and (mask.shape[0] != len(query) or mask.shape[1] > keys):
        reasons.append(
            f"attention_mask has shape {tuple(mask.shape)}: give ({len(query)}, keys), of at most"
            f" {keys} keys"
        )
    offsets = [keywords.get(name) is not None for name in ("cu_seq_lens_q", "cu_seq_lens_k")]
    if any(offsets) and not all(offsets):
        reasons.append("one of cu_seq_lens_q and cu_seq_lens_k is missing: give both")
    if any(offsets) and mask is not None and mask.dtype == torch.bool:
        reasons.append("cu_seq_lens_q and a padding mask are given: give one of them")
    if _stays_fp32(module, query):
        reasons.append(
            "the model computes in float32: load it with dtype=torch.bfloat16 or torch.float16, or"
            " call it inside torch.autocast"
        )
    if reasons:
        raise UnsupportedProblem(
            f"attention '{NAME}' cannot compute this {type(module).__name__}", reasons
        )


def _stays_fp32(module: nn.Module, query: Tensor) -> bool:
    return (
        query.dtype == torch.float32
        and not torch.is_autocast_enabled(query.device.type)
        and _half_of(module) is None
    )


def _in_half(module: nn.Module, *operands: Tensor) -> tuple[Tensor, ...]:
    """Operands that norms kept in fp32 have widened, in the dtype of the weights again."""
    query = operands[0]
    if query.dtype != torch.float32 or torch.is_autocast_enabled(query.device.type):
        return operands
    dtype = _half_of(module)
    _tell_of_cast(dtype)
    return tuple(x.to(dtype) for x in operands)


def _half_of(module: nn.Module) -> torch.dtype | None:
    return next((x.dtype for x in module.parameters() if x.dtype in _HALVES), None)


@lru_cache
def _tell_of_cast(dtype: torch.dtype | None) -> None:
    logger().warning("float32 queries, keys and values are cast to the weights' %s", dtype)


def _output(result: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    assert isinstance(result, Tensor)  # no LSE was asked for
    return result


def _without_ours(preload: Callable[..., Any]) -> Callable[..., Any]:
    """transformers 5 takes every name with "flash" in it for a package it has to import."""

    @wraps(preload)
    def preload_others(implementation: str | None, *args: Any, **kwargs: Any) -> Any:
        return None if implementation == NAME else preload(implementation, *args, **kwargs)

    return preload_others


AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, two_dimensional_mask)
if hasattr(modeling_utils, "lazy_import_flash_attention"):  # not before 4.56
    modeling_utils.lazy_import_flash_attention = _without_ours(
        modeling_utils.lazy_import_flash_attention
    )
