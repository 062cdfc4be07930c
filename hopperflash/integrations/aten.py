"""PyTorch's flash attention operators in terms of the public functions.

`aten::_flash_attention_*` takes (batch, seqlen, heads, head_dim), or packed rows as (total, heads,
head_dim). `aten::_scaled_dot_product_flash_attention*` takes (batch, heads, seqlen, head_dim), a
transposed view of the former, so nothing is copied. Results have the strides that the
operators' meta functions give them, since compiled code relies on these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hopperflash.api import (
    flash_attn_backward,
    flash_attn_func,
    flash_attn_varlen_func,
    supports,
)
from hopperflash.problem import Direction

Arguments = Mapping[str, Any]  # of an operator's call, by the names in its schema
Layout = Callable[[Tensor], Tensor]  # to that of the public functions and back

INPUTS = ("query", "key", "value")


@dataclass(frozen=True)
class Request:
    """What a call of an operator asks for.

    `reasons` are against it from the start: arguments that the public functions have not. Where
    there are none, `serve` answers the call or raises what the public functions raise.
    """

    operands: tuple[Tensor, Tensor, Tensor]  # q, k and v, as the public functions take them
    options: dict[str, Any]
    reasons: list[str]
    serve: Callable[[], Any]
    direction: Direction

    def every_reason(self) -> list[str]:
        """Those of the public functions too."""
        answer = supports(*self.operands, direction=self.direction, **self.options)
        return [*self.reasons, *answer.reasons]


@dataclass(frozen=True)
class Operator:
    """An operator, how its calls are read, and the dispatch keys that it is served under."""

    name: str
    request: Callable[[Arguments], Request]
    keys: tuple[str, ...] = ("CPU", "CUDA")


def _forward(
    layout: Layout,
    answer: Callable[[Arguments, Tensor, Tensor], Any],
    unserved: Callable[[Arguments], list[str]],
) -> Callable[[Arguments], Request]:
    """Reads calls of a forward, whose results `answer` makes of out and LSE."""

    def request(a: Arguments) -> Request:
        q, k, v = (layout(a[name]) for name in INPUTS)
        options = _options(a)
        function: Callable[..., Any] = flash_attn_func
        if a.get("cum_seq_q") is not None or a.get("cum_seq_k") is not None:
            function = flash_attn_varlen_func
            options |= {
                "cu_seqlens_q": a["cum_seq_q"],
                "cu_seqlens_k": a["cum_seq_k"],
                "seqused_k": a.get("seqused_k"),
                "max_seqlen_q": a["max_q"],
                "max_seqlen_k": a["max_k"],
            }

        def serve() -> Any:
            out = a["out"] if "out" in a else torch.empty_like(a["query"])
            _, lse = function(q, k, v, **options, out=layout(out), return_lse=True)
            return answer(a, out, lse)

        return Request((q, k, v), options, unserved(a), serve, "forward")

    return request


def _backward(
    layout: Layout,
    memory: Callable[[Tensor], Tensor],
    unserved: Callable[[Arguments], list[str]],
) -> Callable[[Arguments], Request]:
    """Reads calls of a backward; `memory` allocates the gradient of an input."""

    def request(a: Arguments) -> Request:
        q, k, v = (layout(a[name]) for name in INPUTS)
        # The forward has no order of additions to choose.
        options = _options(a) | {"deterministic": torch.are_deterministic_algorithms_enabled()}
        if a.get("cum_seq_q") is not None or a.get("cum_seq_k") is not None:
            options |= {"cu_seqlens_q": a["cum_seq_q"], "cu_seqlens_k": a["cum_seq_k"]}

        def serve() -> Any:
            dout, out = layout(a["grad_out"]), layout(a["out"])
            gradients = tuple(memory(a[name]) for name in INPUTS)
            dq, dk, dv = map(layout, gradients)
            flash_attn_backward(dout, q, k, v, out, a["logsumexp"], **options, dq=dq, dk=dk, dv=dv)
            return gradients

        return Request((q, k, v), options, unserved(a), serve, "backward")

    return request


def _options(a: Arguments) -> dict[str, Any]:
    """The keywords that forward and backward share."""
    return {
        "softmax_scale": a["scale"],
        "causal": a["is_causal"],
        "window_size": (a.get("window_size_left"), a.get("window_size_right")),
        # The SMs that torch's matrix products leave to communication.
        "sm_margin": torch._C._get_sm_carveout_experimental() or 0,
    }


def _unserved(a: Arguments) -> list[str]:
    """The arguments that the public functions have not."""
    found = {
        "dropout_p above 0: dropout is not implemented": a["dropout_p"] > 0.0,
        "return_debug_mask: probabilities are never materialised": a.get("return_debug_mask"),
        "alibi_slopes: the ALiBi bias is not implemented": a.get("alibi_slopes") is not None,
        "block_table: keys in pages are not implemented": a.get("block_table") is not None,
        "num_splits above 1: keys are not split": (a.get("num_splits") or 1) > 1,
        "seqused_k without cum_seq_k: only packed keys have counts": (
            a.get("seqused_k") is not None and a.get("cum_seq_k") is None
        ),
    }
    return [reason for reason, holds in found.items() if holds]


def _unserved_on_cpu(a: Arguments) -> list[str]:
    found = {
        "attn_mask: only causal masks are served": a["attn_mask"] is not None,
        "is_causal with unequal lengths: this operator aligns the mask top-left": (
            a["is_causal"] and a["query"].shape[-2] != a["key"].shape[-2]
        ),
    }
    return [*_unserved(a), *(reason for reason, holds in found.items() if holds)]


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _rows_before_heads(tensor: Tensor) -> Tensor:
    """Exchanges heads and rows; the public functions refuse what has another rank."""
    return tensor.transpose(1, 2) if tensor.dim() == 4 else tensor


def _contiguous_rows(tensor: Tensor) -> Tensor:
    """Memory like `tensor` whose rows lie before its heads."""
    return _rows_before_heads(
        torch.empty_like(_rows_before_heads(tensor), memory_format=torch.contiguous_format)
    )


def _flash_answer(a: Arguments, out: Tensor, lse: Tensor) -> tuple[Any, ...]:
    return out, lse, *_nothing_random(out)


def _lse_alone(a: Arguments, out: Tensor, lse: Tensor) -> Tensor:
    return lse


def _sdpa_answer(a: Arguments, out: Tensor, lse: Tensor) -> tuple[Any, ...]:
    # Offsets of packed sequences there are none; the maximum lengths are those of the operands.
    return out, lse, None, None, out.shape[2], a["key"].shape[2], *_nothing_random(out)


def _cpu_answer(a: Arguments, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    return out, lse.mT.contiguous().mT


def _nothing_random(out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Seed, offset and debug mask of a forward without dropout."""
    seed = torch.zeros(2, dtype=torch.uint64, device=out.device)
    offset = torch.zeros((), dtype=torch.uint64, device=out.device)
    return seed, offset, torch.empty(0, dtype=out.dtype, device=out.device)


OPERATORS = (
    Operator("_flash_attention_forward", _forward(_as_it_is, _flash_answer, _unserved)),
    Operator(
        "_flash_attention_forward_no_dropout_inplace",
        _forward(_as_it_is, _lse_alone, _unserved),
    ),
    Operator("_flash_attention_backward", _backward(_as_it_is, torch.empty_like, _unserved)),
    Operator(
        "_scaled_dot_product_flash_attention",
        _forward(_rows_before_heads, _sdpa_answer, _unserved),
    ),
    Operator(
        "_scaled_dot_product_flash_attention_backward",
        _backward(_rows_before_heads, torch.empty_like, _unserved),
    ),
    Operator(
        "_scaled_dot_product_flash_attention_for_cpu",
        _forward(_rows_before_heads, _cpu_answer, _unserved_on_cpu),
        keys=("CPU",),
    ),
    Operator(
        "_scaled_dot_product_flash_attention_for_cpu_backward",
        _backward(_rows_before_heads, _contiguous_rows, _unserved_on_cpu),
        keys=("CPU",),
    ),
)
