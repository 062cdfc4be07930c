"""One batch entry: of a dense tensor, or of packed rows that a table of tiles describes."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32

from hopperflash.plan.config import TILE_FIELDS

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


class AssignedTile(NamedTuple):
    """What a CTA computes."""

    block: Int32  # of queries or of keys; -1 where nothing is left to do
    head: Int32
    sequence: Sequence


@cute.jit
def assigned_tile(
    mTiles: Any,  # (tiles, 8) int32 of packed sequences; None of dense tensors
    heads: Int32,
    seqlens: Seqlens,
    descending: Constexpr[bool],
):
    """The block, head and sequence of this CTA.

    Dense: the grid is (blocks, heads, batch). Packed: (tiles * heads), heads first, so that those
    which share K and V run close together; the order of tiles is the table's.
    """
    block, head, batch = cute.arch.block_idx()
    if cutlass.const_expr(mTiles is None):
        if cutlass.const_expr(descending):
            block = cute.arch.grid_dim()[0] - 1 - block
        zero = Int32(0)
        sequence = Sequence(batch, zero, Rows(zero, seqlens.q), Rows(zero, seqlens.k), seqlens)
    else:
        tile = block // heads
        head = block - tile * heads
        block, sequence = read_tile(mTiles, tile)
    return AssignedTile(block, head, sequence)


@cute.jit
def read_tile(mTiles: cute.Tensor, tile: Int32):
    """(block, sequence) of a row of the table: a `TILE_FIELDS` record."""
    fields = cute.make_rmem_tensor(len(TILE_FIELDS), Int32)
    cute.autovec_copy(mTiles[tile, None], fields)
    value = dict(zip(TILE_FIELDS, (fields[i] for i in range(len(TILE_FIELDS))), strict=True))
    sequence = Sequence(
        Int32(0),
        value["sequence"],
        Rows(value["first_q"], value["rows_q"]),
        Rows(value["first_k"], value["rows_k"]),
        Seqlens(value["seqlen_q"], value["seqlen_k"]),
    )
    return value["block"], sequence


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
