"""The store warp: adds each dQ tile to the fp32 accumulator in global memory by TMA.

Deterministic: the CTAs that add to a query tile take turns (`common/turns.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32, pipeline

from hopperflash.plan.config import BackwardConfig

from ...common import turns
from ...common.band import Band
from ...common.sequence import Rows
from ...common.tiles import key_tile
from ...common.work import AssignedTile, Walk, for_each_tile
from .. import tma
from .mma import consumer_threads
from .storage import Barrier, SmemTensors


@dataclass(frozen=True)
class StoreContext:
    """Where the store warp adds dQ tiles."""

    config: Constexpr[BackwardConfig]
    packed: Constexpr[bool]
    band: Band
    tma_dQ: tma.TmaTensor  # (seqlen_q, head_dim, heads_q, batch) fp32
    mTurn: cute.Tensor  # (batch, heads_q, query blocks) int32
    smem: SmemTensors
    group: Int32  # query heads a key head


@cute.jit
def store_dQ(ctx: StoreContext, walk: Walk):
    """Runs in one whole warp, until all additions of the CTA are complete."""
    for_each_tile(walk, add_tiles, ctx, None)
    cute.arch.cp_async_bulk_wait_group(0)


@cute.jit
def add_tiles(ctx: StoreContext, assigned: AssignedTile, state: None):
    """dQ[m_block] += tile, for all query tiles of a key tile in the consumers' order."""
    config = ctx.config
    tile = key_tile(assigned, ctx.band, ctx.group, config, ctx.packed)
    sequence = tile.sequence
    queries = Rows(sequence.q.first, sequence.seqlens.q)
    threads = consumer_threads(config) + cute.arch.WARP_SIZE
    empty = pipeline.NamedBarrier(barrier_id=int(Barrier.DQ_EMPTY), num_threads=threads)
    full = pipeline.NamedBarrier(barrier_id=int(Barrier.DQ_FULL), num_threads=threads)
    for g in cutlass.range(tile.group, unroll=1):
        head = tile.head_k * tile.group + g
        gdQ = cute.local_tile(
            tma.head_rows(ctx.tma_dQ, head, sequence.batch, queries, ctx.packed),
            (config.tile_m, config.head_dim),
            (None, 0),
        )  # (tile_m, head_dim, query_blocks)
        tdQsdQ, tdQgdQ = tma.partition(ctx.tma_dQ, ctx.smem.sdQ, gdQ)
        for m_block in cutlass.range(tile.queries.begin, tile.queries.end, unroll=1):
            empty.arrive()
            full.arrive_and_wait()
            counter = ctx.mTurn.iterator
            if cutlass.const_expr(config.deterministic):
                place = (sequence.batch, head, tile.first_padded_block + m_block)
                counter = cute.domain_offset(place, ctx.mTurn).iterator
                turns.wait_for_turn(
                    counter, turns.turn_of(tile, m_block, ctx.band, config.tile_m, config.tile_n)
                )
                # The additions go through the async proxy.
                cute.arch.fence_proxy("async.global")
            cute.copy(ctx.tma_dQ.atom, tdQsdQ[None, 0], tdQgdQ[None, m_block])
            cute.arch.cp_async_bulk_commit_group()
            if cutlass.const_expr(config.deterministic):
                cute.arch.cp_async_bulk_wait_group(0)
                cute.arch.fence_proxy("async.global")
                with cute.arch.elect_one():
                    turns.pass_turn(counter)
            else:
                cute.arch.cp_async_bulk_wait_group(0, read=True)
