"""One batch entry: of a dense tensor, or of packed rows that a table of tiles describes."""

from __future__ import annotations

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32

from .band import Seqlens


class Rows(NamedTuple):
    """Rows of a tensor that belong to a sequence; results are written to all of them."""

    first: Int32
    count: Int32


class Sequence(NamedTuple):
    """Where a batch entry lies. Of packed tensors the batch mode has length 1."""

    batch: Int32  # index of the tensors' batch mode
    index: Int32  # among the sequences
    q: Rows  # seqlens.q of them are queries, the others see no key
    k: Rows  # seqlens.k of them are keys, the others are seen by no query
    seqlens: Seqlens


def sequence_rows(
    mX: cute.Tensor,  # (batch, rows, heads, head_dim)
    head: Int32,
    batch: Int32,
    rows: Rows,
) -> cute.Tensor:
    """(rows, head_dim) of one head of a sequence."""
    gX = cute.domain_offset((rows.first, 0), mX[batch, None, head, None])
    shape = (rows.count, cute.size(gX, mode=[1]))
    return cute.make_tensor(gX.iterator, cute.make_layout(shape, stride=gX.stride))


def sequence_heads(
    mX: cute.Tensor,  # (batch, rows, heads, head_dim)
    head_group: Int32,
    batch: Int32,
    rows: Rows,
    group: int,
) -> cute.Tensor:
    """(group, rows, head_dim) of a sequence, of the heads of one group."""
    gX = cute.domain_offset((rows.first, head_group * group, 0), mX[batch, None, None, None])
    shape = (group, rows.count, cute.size(gX, mode=[2]))
    stride = (gX.stride[1], gX.stride[0], gX.stride[2])
    return cute.make_tensor(gX.iterator, cute.make_layout(shape, stride=stride))


def sequence_statistic(
    mX: cute.Tensor,  # (batch, heads, rows)
    head: Int32,
    batch: Int32,
    rows: Rows,
    group: int = 1,
) -> cute.Tensor:
    """(group, rows) of a sequence, from the first head of group number `head` on."""
    gX = cute.domain_offset((head * group, rows.first), mX[batch, None, None])
    return cute.make_tensor(gX.iterator, cute.make_layout((group, rows.count), stride=gX.stride))


def first_padded_block(sequence: Sequence, packed: bool, tile_m: int) -> Int32:
    """Where the query blocks of a sequence begin in arrays that are padded to whole blocks.

    Sequence s begins no earlier than block first // tile_m + s, since each before it fills up at
    most one block more than its rows.
    """
    return sequence.q.first // tile_m + sequence.index if packed else Int32(0)
