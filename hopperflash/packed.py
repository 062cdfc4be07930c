"""Packed sequences on a CPU: one after the other through the streaming implementation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from hopperflash.problem import GRADIENTS
from hopperflash.problem.mask import MaskSpec
from hopperflash.streaming import streaming_attention, streaming_gradients

_ROWS_OF_QUERIES = ("q", "out", "dout")  # (1, total_q, heads_q, ...)
_STATISTICS = ("lse", "dlse")  # (1, heads_q, total_q)


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Mapping[str, Tensor],
    mask: MaskSpec,
    *,
    softmax_scale: float,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Attention within each sequence; `packed_gradients` has its gradients, autograd has not.

    Args:
        q: (1, total_q, heads_q, head_dim).
        k: (1, total_k, heads_k, head_dim).
        v: (1, total_k, heads_k, head_dim_v).
        lengths: "cu_seqlens_q" and "cu_seqlens_k", (sequences + 1,) ascending offsets; "seqused_q"
            and "seqused_k", (sequences,), where fewer rows of a sequence count.

    Returns:
        out (1, total_q, heads_q, head_dim_v) and LSE (1, heads_q, total_q). Rows that belong to no
        sequence see no key.
    """
    sides = [_pieces(lengths, side, x.shape[1]) for side, x in (("q", q), ("k", k))]
    sizes_q, sizes_k = ([size for size, _ in pieces] for pieces in sides)
    keys = {number: i for i, (_, number) in enumerate(sides[1]) if number is not None}
    split_q, split_k, split_v = (
        torch.split(x, sizes, dim=1) for x, sizes in ((q, sizes_q), (k, sizes_k), (v, sizes_k))
    )
    results = []
    for rows, (_, number) in zip(split_q, sides[0], strict=True):
        seen = (k[:, :0], v[:, :0])
        if number is not None:
            seen = (split_k[keys[number]], split_v[keys[number]])
        results.append(
            streaming_attention(rows, *seen, mask, softmax_scale=softmax_scale, softcap=softcap)
        )
    outs, lses = zip(*results, strict=True)
    return torch.cat(outs, dim=1), torch.cat(lses, dim=2)


def packed_gradients(
    operands: Mapping[str, Tensor],
    lengths: Mapping[str, Tensor],
    mask: MaskSpec,
    *,
    softmax_scale: float,
    softcap: float = 0.0,
    gradients: Sequence[str] = GRADIENTS,
) -> dict[str, Tensor]:
    """ "dq", "dk" and "dv" of `packed_attention` from its results; `streaming_gradients` has names.

    Rows that belong to no sequence have gradients of 0.
    """
    q, k = operands["q"], operands["k"]
    found = {name: torch.zeros_like(operands[name[1:]]) for name in gradients}
    queries, keys = (_rows(lengths, side, x.shape[1]) for side, x in (("q", q), ("k", k)))
    for rows_q, rows_k in zip(queries, keys, strict=True):
        sequence = {
            name: x[:, :, rows_q]
            if name in _STATISTICS
            else x[:, rows_q if name in _ROWS_OF_QUERIES else rows_k]
            for name, x in operands.items()
        }
        of_sequence = streaming_gradients(
            sequence, mask, softmax_scale=softmax_scale, softcap=softcap, gradients=gradients
        )
        for name, gradient in of_sequence.items():
            found[name][:, rows_q if name == "dq" else rows_k] = gradient
    return found


def _rows(lengths: Mapping[str, Tensor], side: str, total: int) -> list[slice]:
    """The rows of every sequence."""
    rows, begin = [], 0
    for size, number in _pieces(lengths, side, total):
        rows += [] if number is None else [slice(begin, begin + size)]
        begin += size
    return rows


def _pieces(lengths: Mapping[str, Tensor], side: str, total: int) -> list[tuple[int, int | None]]:
    """Consecutive (rows, sequence) that cover all rows; None where rows belong to no sequence."""
    offsets, used = lengths[f"cu_seqlens_{side}"].tolist(), lengths.get(f"seqused_{side}")
    counts = [end - begin for begin, end in pairwise(offsets)]
    counts = counts if used is None else used.tolist()
    return list(_consecutive(offsets, counts, total))


def _consecutive(
    offsets: list[int], counts: list[int], total: int
) -> Iterator[tuple[int, int | None]]:
    row = 0
    for number, (begin, count) in enumerate(zip(offsets, counts, strict=False)):
        yield begin - row, None
        yield count, number
        row = begin + count
    yield total - row, None
