"""The end of a tile: normalise, store LSE from registers and O through shared memory by TMA."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32, pipeline

from hopperflash.plan.config import ForwardConfig

from ...common import row_statistics, softmax
from ...common.layouts import mn_view
from ...common.sequence import sequence_statistic
from ...common.tiles import QueryTile
from .. import copies, tma, wgmma
from .storage import Barrier, SmemTensors


@dataclass(frozen=True)
class EpilogueContext:
    """Where a consumer warpgroup's rows go."""

    config: Constexpr[ForwardConfig]
    packed: Constexpr[bool]
    own_rows: Constexpr[bool]  # a warpgroup's rows of O lie where only its own rows of Q lay
    mma_O: cute.TiledMma
    smem: SmemTensors
    tma_O: tma.TmaTensor  # (seqlen_q, head_dim_v, heads_q, batch), one warpgroup's rows a copy
    mLSE: cute.Tensor  # (batch, heads_q, seqlen_q) fp32
    consumer_tidx: Int32


@cute.jit
def epilogue(ctx: EpilogueContext, tile: QueryTile, acc_O: cute.Tensor, stats: softmax.RowStats):
    """O = acc_O / row_sum and LSE, for the rows that exist."""
    inverse_sum = cute.make_rmem_tensor_like(stats.row_sum)
    lse = cute.make_rmem_tensor_like(stats.row_sum)
    softmax.finish_rows(stats, inverse_sum, lse)
    config, sequence = ctx.config, tile.sequence
    first_query = tile.m_block * config.queries
    cO = cute.make_identity_tensor((config.tile_m, config.head_dim_v))
    thr_mma = ctx.mma_O.get_slice(ctx.consumer_tidx)
    if cutlass.const_expr(ctx.packed):
        row_statistics.empty_rows(
            (inverse_sum, lse), cO, thr_mma, sequence.seqlens.q - first_query, config.group
        )
    softmax.rescale_rows(mn_view(acc_O), inverse_sum)
    gLSE = sequence_statistic(ctx.mLSE, tile.head, sequence.batch, sequence.q, config.group)
    row_statistics.store_rows(lse, gLSE, cO, thr_mma, first_query)
    store_output(ctx, tile, acc_O)


@cute.jit
def store_output(ctx: EpilogueContext, tile: QueryTile, acc_O: cute.Tensor):
    """A warpgroup overwrites its own rows of Q, which only its own finished GEMMs have read.

    It stores them alone, unless rows are of several heads: those of one query must go together.
    """
    config = ctx.config
    if cutlass.const_expr(not ctx.own_rows):
        consumers_barrier(config).arrive_and_wait()
    copies.store_converted(ctx.mma_O, acc_O, ctx.smem.sO[None, None, 0], ctx.consumer_tidx)
    # The TMA store reads through the async proxy what all its warps wrote.
    cute.arch.fence_view_async_shared()
    warp_idx = cute.arch.make_warp_uniform(ctx.consumer_tidx // cute.arch.WARP_SIZE)
    warps = wgmma.THREADS_PER_WARPGROUP // cute.arch.WARP_SIZE
    if cutlass.const_expr(config.group > 1):
        consumers_barrier(config).arrive_and_wait()
        if warp_idx == 0:
            store_tile(ctx.tma_O, *heads_tile(ctx, tile))
    else:
        warpgroup_idx = warp_idx // warps
        pipeline.NamedBarrier(
            barrier_id=int(Barrier.WARPGROUP) + warpgroup_idx,
            num_threads=wgmma.THREADS_PER_WARPGROUP,
        ).arrive_and_wait()
        tOsO, tOgO = warpgroup_tile(ctx, tile, warpgroup_idx)
        if warp_idx % warps == 0:
            store_tile(ctx.tma_O, tOsO, tOgO)


def consumers_barrier(config: ForwardConfig) -> pipeline.NamedBarrier:
    """Of all consumer warpgroups."""
    threads = config.consumer_warpgroups * wgmma.THREADS_PER_WARPGROUP
    return pipeline.NamedBarrier(barrier_id=int(Barrier.CONSUMERS), num_threads=threads)


def warpgroup_tile(
    ctx: EpilogueContext, tile: QueryTile, warpgroup_idx: Int32
) -> tuple[cute.Tensor, cute.Tensor]:
    """Shared and global O of a warpgroup's rows."""
    config, sequence = ctx.config, tile.sequence
    rows = (wgmma.ROWS_PER_WARPGROUP, config.head_dim_v)
    gO = cute.local_tile(
        tma.head_rows(ctx.tma_O, tile.head, sequence.batch, sequence.q, ctx.packed),
        rows,
        (tile.m_block * config.consumer_warpgroups + warpgroup_idx, 0),
    )
    sO = cute.local_tile(ctx.smem.sO[None, None, 0], rows, (warpgroup_idx, 0))
    return tma.partition(ctx.tma_O, sO, gO)


def heads_tile(ctx: EpilogueContext, tile: QueryTile) -> tuple[cute.Tensor, cute.Tensor]:
    """Shared and global O of the queries of a tile, for all heads of its group."""
    config, sequence = ctx.config, tile.sequence
    gO = cute.local_tile(
        tma.heads_rows(ctx.tma_O, sequence.batch, sequence.q, ctx.packed),
        (config.group, config.queries, config.head_dim_v),
        (tile.head, tile.m_block, 0),
    )
    sO = ctx.smem.sO_box[None, None, None, 0]
    return tma.partition(ctx.tma_O, sO, gO, tile_modes=3)


@cute.jit
def store_tile(tma_O: tma.TmaTensor, tOsO: cute.Tensor, tOgO: cute.Tensor):
    """By one warp, which waits until the memory has been read."""
    cute.copy(tma_O.atom, tOsO, tOgO)
    cute.arch.cp_async_bulk_commit_group()
    cute.arch.cp_async_bulk_wait_group(0, read=True)
