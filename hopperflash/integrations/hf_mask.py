"""What transformers' mask functions ask for, as a 2-D mask that packed attention can follow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function

from hopperflash.errors import UnsupportedProblem

MaskFunction = Callable[..., Any]

_COMBINE = {"and_masks", "remap_positions_for_packed_sequence"}
_PACKED = "packed_sequence_mask_function"
# The attention function hears of causality and window by arguments of its own.
_EXPRESSED = {
    "causal_mask_function",
    "bidirectional_mask_function",
    "sliding_window_overlay",
    "sliding_window_bidirectional_overlay",
    _PACKED,
}


def attention_mask(
    batch_size: int,
    kv_length: int,
    kv_offset: int = 0,
    mask_function: MaskFunction = causal_mask_function,
    attention_mask: Tensor | None = None,
    **further: Any,
) -> Tensor | None:
    """The mask that `attention_forward` is given, made once per model call and kind of layer.

    Args:
        attention_mask: (batch, tokens seen), False where padded; only the last `kv_length` count.
        further: `q_length` and `q_offset` of transformers 5, `cache_position` of transformers 4.

    Returns:
        None where every key counts. Else (batch, keys): bool, or int32 with the number of the
        document that a token belongs to, counted from 1. Where there are fewer keys than
        `kv_length`, the last ones are memory that a static cache has not filled.

    Raises:
        UnsupportedProblem: the model's mask is more than causal, window, padding and documents.
    """
    pieces = set(_pieces(mask_function))
    if pieces - _EXPRESSED:
        raise UnsupportedProblem(
            "attention 'hopperflash' cannot follow this model's mask",
            [
                f"{piece}: neither causal, window, padding nor documents; load the model with"
                " attn_implementation='sdpa' or 'flex_attention'"
                for piece in sorted(pieces - _EXPRESSED)
            ],
        )
    if attention_mask is not None:
        mask = attention_mask[:, -kv_length:]
        return None if mask.shape[1] == kv_length and mask.all() else mask
    if _PACKED in pieces:
        return _documents(mask_function, batch_size, further)
    if "bidirectional_mask_function" in pieces:
        return None
    positions = further.get("cache_position")
    queries = further["q_length"] if positions is None else len(positions)
    if kv_length == queries:
        return None
    offset = further["q_offset"] if positions is None else positions[0]
    filled = int(offset) + queries - kv_offset
    if filled >= kv_length:
        return None
    return torch.ones(batch_size, filled, dtype=torch.bool, device=_device(further))


def _pieces(function: MaskFunction) -> Iterator[str]:
    """The functions a mask is the intersection of, by name; their own names where unknown."""
    ours = function.__module__ == causal_mask_function.__module__
    name = function.__qualname__.split(".")[0] if ours else _full_name(function)
    if name not in _COMBINE:
        yield name
        return
    for cell in function.__closure__ or ():
        held = cell.cell_contents
        for part in held if isinstance(held, tuple) else (held,):
            if callable(part):
                yield from _pieces(part)


def _full_name(function: MaskFunction) -> str:
    return f"{function.__module__}.{function.__qualname__}"


def _documents(function: MaskFunction, batch: int, further: dict[str, Any]) -> Tensor:
    """(batch, tokens) int32: which document a token belongs to.

    A document begins where a token does not see the one before it.
    """
    positions = further.get("cache_position")
    tokens = further["q_length"] if positions is None else len(positions)
    device = _device(further)
    rows = torch.arange(batch, device=device)[:, None]
    later = torch.arange(1, tokens, device=device)[None]
    begins = ~function(rows, torch.zeros_like(rows), later, later - 1)
    return 1 + torch.nn.functional.pad(begins.cumsum(1, dtype=torch.int32), (1, 0))


def _device(further: dict[str, Any]) -> torch.device | None:
    """transformers 4 does not name the device, but has a tensor on it."""
    positions = further.get("cache_position")
    device = further.get("device")
    return positions.device if device is None and positions is not None else device
