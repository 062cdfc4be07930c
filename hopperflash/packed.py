"""Packed sequences on a CPU: one after the other through the streaming implementation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise

import torch
from torch import Tensor

from hopperflash.problem.mask import MaskSpec
from hopperflash.streaming import streaming_attention


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
    """Attention within each sequence; differentiable once, as `streaming_attention`.

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
    place = {number: i for i, (_, number) in enumerate(sides[1]) if number is not None}
    split_q, split_k, split_v = (
        torch.split(x, sizes, dim=1) for x, sizes in ((q, sizes_q), (k, sizes_k), (v, sizes_k))
    )

    def one_sequence(rows: Tensor, number: int | None) -> tuple[Tensor, Tensor]:
        nothing = (k[:, :0], v[:, :0])
        keys_of, values_of = (
            nothing if number is None else (split_k[place[number]], split_v[place[number]])
        )
        return streaming_attention(
            rows, keys_of, values_of, mask, softmax_scale=softmax_scale, softcap=softcap
        )

    results = [
        one_sequence(rows, number) for rows, (_, number) in zip(split_q, sides[0], strict=True)
    ]
    outs, lses = zip(*results, strict=True)
    return torch.cat(outs, dim=1), torch.cat(lses, dim=2)


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
