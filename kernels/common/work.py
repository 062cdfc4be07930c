"""Which tiles a CTA computes, and in which order.

The tiles of a launch are numbered: blocks of a head first, then heads, then batch entries; of
packed sequences the heads of a row of the table first, then the rows. Where some blocks cost more
than others, `head_swizzle` heads at a time are numbered together, block by block: the longest
tiles of all of them come first, and their keys and values stay in L2 meanwhile.

A single-tile launch has a CTA for each tile. Of a persistent one, CTA c of C computes the tiles c,
c + C, c + 2 C and so on. Of a dynamic one, it computes tile c and then the first that nobody has
taken, as often as there is one. Tiles start in the same order, and no more than C at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32, pipeline

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
    head_swizzle: Int32  # heads whose blocks take turns; divides `heads`

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


class TileQueue(NamedTuple):
    """How the roles of a CTA learn of its next tile: from one thread, by shared memory."""

    ring: pipeline.PipelineAsync  # a stage
    sNext: cute.Tensor  # (1,) int32: the number of a tile


@dataclass(frozen=True)
class Walk:
    """The way of a CTA through the tiles; dense blocks may come in descending order, and those of
    several heads take turns."""

    scheduler: Constexpr[Scheduler]
    descending: Constexpr[bool]
    swizzled: Constexpr[bool]
    cluster: Constexpr[int]  # CTAs that take neighbouring blocks of a head; divides the blocks
    tiles: Tiles
    queue: Any = None  # TileQueue of a dynamic walk


@cute.jit
def grid(tiles: Tiles, scheduler: Constexpr[Scheduler], max_ctas: Any = None):
    """CTAs of a launch: one a tile, or at most as many as may run at once."""
    if cutlass.const_expr(scheduler is not Scheduler.SINGLE):
        ctas = (min(tiles.count, max_ctas), 1, 1)
    elif cutlass.const_expr(tiles.table is None):
        swizzle = tiles.head_swizzle
        ctas = (tiles.blocks * swizzle, tiles.heads // swizzle, tiles.batch)
    else:
        ctas = (tiles.count, 1, 1)
    return ctas


@cute.jit
def for_each_tile(walk: Walk, compute: Constexpr[Callable[..., Any]], ctx: Any, state: Any):
    """`state = compute(ctx, tile, state)` for the tiles of this CTA; returns the last state.

    Every role of a CTA walks alike.
    """
    first = first_number(walk)
    if cutlass.const_expr(walk.scheduler is Scheduler.SINGLE):
        state = for_tile(walk, first, compute, ctx, state)
    elif cutlass.const_expr(walk.scheduler is Scheduler.PERSISTENT):
        ctas, _, _ = cute.arch.grid_dim()
        last, step = walk.tiles.count // walk.cluster, ctas // walk.cluster
        for number in cutlass.range(first, last, step, unroll=1):
            state = for_tile(walk, number, compute, ctx, state)
    else:
        number = first
        place = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, 1)
        while number < walk.tiles.count:
            state = for_tile(walk, number, compute, ctx, state)
            number = next_number(walk.queue, place)
            place.advance()
    return state


def single_tiles(tiles: Tiles) -> Walk:
    """A CTA for each tile, in no order that matters."""
    return Walk(Scheduler.SINGLE, descending=False, swizzled=False, cluster=1, tiles=tiles)


def with_queue(walk: Walk, queue: TileQueue) -> Walk:
    """The same walk, led by a queue."""
    return Walk(walk.scheduler, walk.descending, walk.swizzled, walk.cluster, walk.tiles, queue)


@cute.jit
def next_number(queue: TileQueue, place: pipeline.PipelineState):
    """The number that is in the queue. Every warp of every role reads it once."""
    queue.ring.consumer_wait(place)
    number = queue.sNext[0]
    # No lane may read after the release.
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        queue.ring.consumer_release(place)
    return number


@cute.jit
def take_tiles(walk: Walk, mTaken: cute.Tensor):
    """Puts this CTA's tiles behind its first into the queue, one ahead of its readers.

    `mTaken` (1,) int32 counts the tiles that any CTA took this way, from 0. Runs in one thread.
    """
    number, _, _ = cute.arch.block_idx()
    ctas, _, _ = cute.arch.grid_dim()
    queue = walk.queue
    place = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, 1)
    while number < walk.tiles.count:
        queue.ring.producer_acquire(place)
        number = ctas + cute.arch.atomic_add(
            mTaken.iterator.llvm_ptr, Int32(1), sem="relaxed", scope="gpu"
        )
        queue.sNext[0] = number
        queue.ring.producer_commit(place)
        place.advance()


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
    return tile_number(walk, first_number(walk))


def first_number(walk: Walk) -> Int32:
    """Of this CTA's first tile."""
    first, _, _ = cute.arch.block_idx()
    return first // walk.cluster if walk.cluster > 1 else first


@cute.jit
def tile_number(walk: Walk, number: Int32):
    """A tile by its number; in a single-tile launch it is that of the CTA.

    The CTAs of a cluster have one number, and a block each.
    """
    tiles, cluster = walk.tiles, walk.cluster
    block, head, batch = cute.arch.block_idx()
    place = Int32(0)
    if cutlass.const_expr(cluster > 1):
        place, block = block % cluster, block // cluster
    if cutlass.const_expr(walk.scheduler is Scheduler.SINGLE):
        number = block
    if cutlass.const_expr(tiles.table is None):
        swizzle = tiles.head_swizzle if walk.swizzled else 1
        if cutlass.const_expr(walk.scheduler is not Scheduler.SINGLE):
            together, heads = tiles.blocks // cluster * swizzle, tiles.heads // swizzle
            head_of_all = number // together
            block = number - head_of_all * together
            batch = head_of_all // heads
            head = head_of_all - batch * heads
        if cutlass.const_expr(walk.swizzled):
            first_head, taking_turns = head * swizzle, block
            block = taking_turns // swizzle
            head = first_head + taking_turns - block * swizzle
        if cutlass.const_expr(cluster > 1):
            block = block * cluster + place
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
