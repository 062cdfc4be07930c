"""Padded batches to packed sequences and back, as users of flash-attn know it."""

from __future__ import annotations

import torch
from torch import Tensor

from hopperflash.errors import InvalidArgument


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The rows of a padded batch that are no padding, one behind the other; differentiable.

    The five values of flash-attn from 2.7 on. The largest length is an int, since its callers treat
    it as one. Counting rows waits for the GPU in any case (`indices` has their number as its
    length), so that reading the largest length waits for nothing more.

    Args:
        hidden_states: (batch, seqlen, ...).
        attention_mask: (batch, seqlen), bool or int; 1 is a row, 0 is padding. Anywhere.
        unused_mask: the same for rows that take up memory and do not count; no row is in both.

    Returns:
        rows (total, ...); indices (total,) int64 of the rows in (batch * seqlen); cu_seqlens
        (batch + 1,) int32; the largest length; seqused (batch,) int32, how many rows of a sequence
        are in `attention_mask`.
    """
    masks = {"attention_mask": attention_mask, "unused_mask": unused_mask}
    _refuse(
        [
            f"{name} has shape {tuple(mask.shape)}: give (batch, seqlen) of hidden_states,"
            f" {tuple(hidden_states.shape[:2])}"
            for name, mask in masks.items()
            if mask is not None and mask.shape != hidden_states.shape[:2]
        ]
    )
    held = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = held.sum(dim=1, dtype=torch.int32)
    largest = lengths.max() if len(lengths) else lengths.sum()
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    indices = held.flatten().nonzero().flatten()
    rows = hidden_states.flatten(0, 1).index_select(0, indices)
    seqused = attention_mask.sum(dim=1, dtype=torch.int32)
    return rows, indices, cu_seqlens, int(largest), seqused


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The rows of `unpad_input` back in their places, (batch, seqlen, ...); padding is 0.

    Args:
        hidden_states: (total, ...).
        indices: (total,), where the rows lie in (batch * seqlen).
    """
    if len(indices) != len(hidden_states):
        _refuse([f"{len(indices)} indices for {len(hidden_states)} rows of hidden_states"])
    padded = hidden_states.new_zeros(batch * seqlen, *hidden_states.shape[1:])
    padded = padded.index_copy(0, indices, hidden_states)
    return padded.view(batch, seqlen, *hidden_states.shape[1:])


def _refuse(reasons: list[str]) -> None:
    if reasons:
        raise InvalidArgument("not a padded batch", reasons)
