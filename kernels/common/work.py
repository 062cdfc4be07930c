"""Which tiles a CTA computes, and in which order.

The tiles of a launch are numbered: blocks of a head first, then heads, then batch entries; of
packed sequences the heads of a row of the table first, then the rows. A single-tile launch has a
CTA for each. Of a persistent one, CTA c of C computes the tiles c, c + C, c + 2 C and so on: tiles
start in the same order, and no more than C at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32

from hopperflash.plan.config import TILE_FIELDS, Scheduler

from .band import Seqlens
from .sequence import Rows, Sequence


class Tiles(NamedTuple):
    """All tiles of a launch."""

    table: Any  # (tiles, fields) int32 of packed sequences, None of dense ones
    blocks: Int32  # of a dense sequence
    heads: Int32
    batch: Int32
    seqlens: Seqlens  # of a dense sequence

    @property
    def count(self) -> Int32:
        """How many there are; of packed sequences, how many there can be."""
        if self.table is None:
            return self.blocks * self.heads * self.batch
        return self.table.shape[0] * self.heads


class AssignedTile(NamedTuple):
    """What a CTA computes."""

    number: Int32
    block: Int32  # of queries or of keys; -1 where the table has no tile left
    head: Int32
    sequence: Sequence


@dataclass(frozen=True)
class Walk:
    """The way of a CTA through the tiles; dense blocks may come in descending order."""

    scheduler: Constexpr[Scheduler]
    descending: Constexpr[bool]
    tiles: Tiles


@cute.jit
def grid(tiles: Tiles, scheduler: Constexpr[Scheduler], max_ctas: Any = None):
    """CTAs of a launch: one a tile, or at most as many as may run at once."""
    if cutlass.const_expr(scheduler is Scheduler.PERSISTENT):
        ctas = (min(tiles.count, max_ctas), 1, 1)
    elif cutlass.const_expr(tiles.table is None):
        ctas = (tiles.blocks, tiles.heads, tiles.batch)
    else:
        ctas = (tiles.count, 1, 1)
    return ctas


@cute.jit
def for_each_tile(walk: Walk, compute: Constexpr[Callable[..., Any]], ctx: Any, state: Any):
    """`state = compute(ctx, tile, state)` for the tiles of this CTA; returns the last state.

    Every role of a CTA walks alike.
    """
    first, _, _ = cute.arch.block_idx()
    if cutlass.const_expr(walk.scheduler is Scheduler.SINGLE):
        state = for_tile(walk, first, compute, ctx, state)
    else:
        ctas, _, _ = cute.arch.grid_dim()
        for number in cutlass.range(first, walk.tiles.count, ctas, unroll=1):
            state = for_tile(walk, number, compute, ctx, state)
    return state


@cute.jit
def for_tile(
    walk: Walk, number: Int32, compute: Constexpr[Callable[..., Any]], ctx: Any, state: Any
):
    """The same for one tile, if the table has one there."""
    tile = tile_number(walk, number)
    if cutlass.const_expr(walk.tiles.table is None):
        state = compute(ctx, tile, state)
    else:
        if tile.block >= 0:
            state = compute(ctx, tile, state)
    return state


@cute.jit
def first_tile(walk: Walk):
    """The first tile of this CTA, or of a single-tile launch its only one.

    Without a block where the table has none for it: rows without a tile come last.
    """
    first, _, _ = cute.arch.block_idx()
    return tile_number(walk, first)


@cute.jit
def tile_number(walk: Walk, number: Int32):
    """A tile by its number; in a single-tile launch it is that of the CTA."""
    tiles = walk.tiles
    block, head, batch = cute.arch.block_idx()
    if cutlass.const_expr(walk.scheduler is Scheduler.SINGLE):
        number = block
    if cutlass.const_expr(tiles.table is None):
        if cutlass.const_expr(walk.scheduler is Scheduler.PERSISTENT):
            head_of_all = number // tiles.blocks
            block = number - head_of_all * tiles.blocks
            batch = head_of_all // tiles.heads
            head = head_of_all - batch * tiles.heads
        if cutlass.const_expr(walk.descending):
            block = tiles.blocks - 1 - block
        zero, seqlens = Int32(0), tiles.seqlens
        sequence = Sequence(batch, zero, Rows(zero, seqlens.q), Rows(zero, seqlens.k), seqlens)
    else:
        row = number // tiles.heads
        head = number - row * tiles.heads
        block, sequence = read_tile(tiles.table, row)
    return AssignedTile(number, block, head, sequence)


@cute.jit
def anew(value: Any):
    """`value`, from which nothing can be computed ahead of this.

    What is the same for all tiles would be computed before the first, and kept in registers that
    the loop over a tile does not have.
    """
    return cute.arch.inline_ptx(
        f"mov.b{value.width} {{$w0}}, {{$r0}};",
        write_only_types=[type(value)],
        read_only_args=[value],
    )


@cute.jit
def read_tile(table: cute.Tensor, row: Int32):
    """(block, sequence) of a row of the table: a `TILE_FIELDS` record."""
    fields = cute.make_rmem_tensor(len(TILE_FIELDS), Int32)
    cute.autovec_copy(table[row, None], fields)
    value = dict(zip(TILE_FIELDS, (fields[i] for i in range(len(TILE_FIELDS))), strict=True))
    sequence = Sequence(
        Int32(0),
        value["sequence"],
        Rows(value["first_q"], value["rows_q"]),
        Rows(value["first_k"], value["rows_k"]),
        Seqlens(value["seqlen_q"], value["seqlen_k"]),
    )
    return value["block"], sequence
