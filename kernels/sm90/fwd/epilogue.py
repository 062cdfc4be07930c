"""The end of a tile: normalise, store LSE from registers and O through shared memory by TMA."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, pipeline

from hopperflash.plan.config import ForwardConfig

from ...common import row_statistics, softmax
from ...common.layouts import mn_view
from ...common.sequence import AssignedTile, sequence_statistic
from .. import copies, tma, wgmma
from .storage import SmemTensors

# Named barriers; 0 belongs to __syncthreads.
_ALL_CONSUMERS = 1
_FIRST_WARPGROUP = 2


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
    tile: AssignedTile
    consumer_tidx: Int32
    scale: Float32  # of the scores whose maximum is kept


@cute.jit
def epilogue(ctx: EpilogueContext, acc_O: cute.Tensor, stats: softmax.RowStats):
    """O = acc_O / row_sum and LSE, for the rows that exist."""
    inverse_sum = cute.make_rmem_tensor_like(stats.row_sum)
    lse = cute.make_rmem_tensor_like(stats.row_sum)
    softmax.finish_rows(stats, inverse_sum, lse, ctx.scale)
    sequence, first_row = ctx.tile.sequence, ctx.tile.block * ctx.config.tile_m
    cO = cute.make_identity_tensor((ctx.config.tile_m, ctx.config.head_dim_v))
    thr_mma = ctx.mma_O.get_slice(ctx.consumer_tidx)
    if cutlass.const_expr(ctx.packed):
        row_statistics.empty_rows((inverse_sum, lse), cO, thr_mma, sequence.seqlens.q - first_row)
    softmax.rescale_rows(mn_view(acc_O), inverse_sum)
    gLSE = sequence_statistic(ctx.mLSE, ctx.tile.head, sequence.batch, sequence.q)
    row_statistics.store_rows(lse, gLSE, cO, thr_mma, first_row)
    store_output(ctx, acc_O)


@cute.jit
def store_output(ctx: EpilogueContext, acc_O: cute.Tensor):
    """A warpgroup overwrites its own rows of Q, which only its own finished GEMMs have read."""
    config = ctx.config
    if cutlass.const_expr(not ctx.own_rows):
        pipeline.NamedBarrier(
            barrier_id=_ALL_CONSUMERS,
            num_threads=config.consumer_warpgroups * wgmma.THREADS_PER_WARPGROUP,
        ).arrive_and_wait()
    sO = ctx.smem.sO[None, None, 0]
    copies.store_converted(ctx.mma_O, acc_O, sO, ctx.consumer_tidx)

    warpgroup_idx = cute.arch.make_warp_uniform(ctx.consumer_tidx // wgmma.THREADS_PER_WARPGROUP)
    # The TMA store reads through the async proxy what all four warps wrote.
    cute.arch.fence_view_async_shared()
    pipeline.NamedBarrier(
        barrier_id=_FIRST_WARPGROUP + warpgroup_idx, num_threads=wgmma.THREADS_PER_WARPGROUP
    ).arrive_and_wait()

    rows = (wgmma.ROWS_PER_WARPGROUP, config.head_dim_v)
    sequence = ctx.tile.sequence
    gO = cute.local_tile(
        tma.head_rows(ctx.tma_O, ctx.tile.head, sequence.batch, sequence.q, ctx.packed),
        rows,
        (ctx.tile.block * config.consumer_warpgroups + warpgroup_idx, 0),
    )
    tOsO, tOgO = tma.partition(ctx.tma_O, cute.local_tile(sO, rows, (warpgroup_idx, 0)), gO)
    warp_in_warpgroup = cute.arch.make_warp_uniform(
        ctx.consumer_tidx % wgmma.THREADS_PER_WARPGROUP // cute.arch.WARP_SIZE
    )
    if warp_in_warpgroup == 0:
        cute.copy(ctx.tma_O.atom, tOsO, tOgO)
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=True)
