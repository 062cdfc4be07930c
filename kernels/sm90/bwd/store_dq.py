"""The store warp: adds each dQ tile to the fp32 accumulator in global memory by TMA."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, pipeline

from hopperflash.plan.config import BackwardConfig

from .. import tma
from .mma import _WARP, consumer_threads
from .storage import Barrier, SmemTensors
from .tiles import KeyTile


@dataclass(frozen=True)
class StoreContext:
    """Where the store warp adds the dQ tiles of one key tile."""

    config: Constexpr[BackwardConfig]
    tma_dQ: tma.TmaTensor  # (seqlen_q, head_dim, heads_q, batch) fp32
    smem: SmemTensors
    tile: KeyTile


@cute.jit
def store_dQ(ctx: StoreContext):
    """Runs in one whole warp: dQ[m_block] += tile, for all query tiles in the consumers' order."""
    config, tile = ctx.config, ctx.tile
    threads = consumer_threads(config) + _WARP
    empty = pipeline.NamedBarrier(barrier_id=int(Barrier.DQ_EMPTY), num_threads=threads)
    full = pipeline.NamedBarrier(barrier_id=int(Barrier.DQ_FULL), num_threads=threads)
    for g in cutlass.range(tile.group, unroll=1):
        gdQ = cute.local_tile(
            ctx.tma_dQ.tensor[None, None, tile.head_k * tile.group + g, tile.batch],
            (config.tile_m, config.head_dim),
            (None, 0),
        )  # (tile_m, head_dim, query_blocks)
        tdQsdQ, tdQgdQ = tma.partition(ctx.tma_dQ, ctx.smem.sdQ, gdQ)
        for m_block in cutlass.range(tile.queries.begin, tile.queries.end, unroll=1):
            empty.arrive()
            full.arrive_and_wait()
            cute.copy(ctx.tma_dQ.atom, tdQsdQ[None, 0], tdQgdQ[None, m_block])
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)
    cute.arch.cp_async_bulk_wait_group(0)
