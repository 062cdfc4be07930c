"""The consumer warpgroups: S = Q K^T, streaming softmax, O += P V."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, pipeline
from cutlass.cute.nvgpu import warpgroup

from hopperflash.plan.config import ForwardConfig, POperand

from ...common import softmax
from ...common.block_range import BlockRange, Seqlens
from ...common.layouts import mn_view, operand_a_view
from ...common.mask import mask_scores
from .. import copies, wgmma
from .storage import Pipelines, SmemTensors


@dataclass(frozen=True)
class MmaContext:
    """What a consumer warpgroup needs for one output tile."""

    config: Constexpr[ForwardConfig]
    causal: Constexpr[bool]
    mma_S: cute.TiledMma
    mma_O: cute.TiledMma
    smem: SmemTensors
    pipelines: Pipelines
    blocks: BlockRange
    seqlens: Seqlens
    m_block: Int32
    consumer_tidx: Int32
    scale_log2: Float32


@dataclass(frozen=True)
class Fragments:
    """A warpgroup's operands and accumulators."""

    tSrQ: cute.Tensor  # (MMA, MMA_M, MMA_K)
    tSrK: cute.Tensor  # (MMA, MMA_N, MMA_K, stages)
    tOrVt: cute.Tensor  # (MMA, MMA_N, MMA_K, stages)
    tOrP: Any  # (MMA, MMA_M, MMA_K) descriptors of sP, or None where P stays in registers
    acc_O: cute.Tensor  # (MMA, MMA_M, MMA_N)
    stats: softmax.RowStats
    rescale: cute.Tensor  # (rows,)


@cute.jit
def mma(ctx: MmaContext):
    """Returns (acc_O, stats): the unnormalised output and the row statistics.

    The blocks that need a mask come first, from the diagonal down; the rest run without one.
    """
    fragments = make_fragments(ctx)
    state_KV = pipeline.make_pipeline_state(
        pipeline.PipelineUserType.Consumer, ctx.config.stages_kv
    )
    state_Q = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, 1)
    if ctx.blocks.visited > 0:
        ctx.pipelines.Q.consumer_wait(state_Q)
    for n in cutlass.range(ctx.blocks.visited - ctx.blocks.unmasked):
        n_block = ctx.blocks.visited - 1 - n
        state_KV = one_key_block(ctx, fragments, state_KV, n_block, masked=True)
    for n in cutlass.range(ctx.blocks.unmasked):
        n_block = ctx.blocks.unmasked - 1 - n
        state_KV = one_key_block(ctx, fragments, state_KV, n_block, masked=False)
    return fragments.acc_O, fragments.stats


def make_fragments(ctx: MmaContext) -> Fragments:
    """Shared-memory descriptors of the warpgroup's operands; accumulators start at zero."""
    config, smem = ctx.config, ctx.smem
    warpgroup_idx = cute.arch.make_warp_uniform(ctx.consumer_tidx // wgmma.THREADS_PER_WARPGROUP)
    wg_mma_S = wgmma.warpgroup_slice(ctx.mma_S, warpgroup_idx)
    wg_mma_O = wgmma.warpgroup_slice(ctx.mma_O, warpgroup_idx)
    acc_O = cute.make_rmem_tensor(
        ctx.mma_O.partition_shape_C((config.tile_m, config.head_dim_v)), Float32
    )
    acc_O.fill(0.0)
    rows = cute.size(mn_view(acc_O), mode=[0])
    tOrP = None
    if smem.sP is not None:
        tOrP = wg_mma_O.make_fragment_A(wg_mma_O.partition_A(smem.sP))[None, None, None, 0]
    return Fragments(
        tSrQ=wg_mma_S.make_fragment_A(wg_mma_S.partition_A(smem.sQ))[None, None, None, 0],
        tSrK=wg_mma_S.make_fragment_B(wg_mma_S.partition_B(smem.sK)),
        tOrVt=wg_mma_O.make_fragment_B(wg_mma_O.partition_B(smem.sVt)),
        tOrP=tOrP,
        acc_O=acc_O,
        stats=softmax.make_row_stats(rows),
        rescale=cute.make_rmem_tensor(rows, Float32),
    )


@cute.jit
def one_key_block(
    ctx: MmaContext,
    fragments: Fragments,
    state_KV: pipeline.PipelineState,
    n_block: Int32,
    masked: Constexpr[bool],
):
    """Stream one K/V block through the row statistics and the output numerator."""
    config, stage = ctx.config, state_KV.index
    acc_S = cute.make_rmem_tensor(
        ctx.mma_S.partition_shape_C((config.tile_m, config.tile_n)), Float32
    )
    ctx.pipelines.K.consumer_wait(state_KV)
    # S = Q K^T
    wgmma.gemm(
        ctx.mma_S, acc_S, fragments.tSrQ, fragments.tSrK[None, None, None, stage], accumulate=False
    )
    warpgroup.wait_group(0)
    ctx.pipelines.K.consumer_release(state_KV)

    if cutlass.const_expr(masked):
        mask_scores(
            acc_S,
            cute.make_identity_tensor((config.tile_m, config.tile_n)),
            ctx.mma_S.get_slice(ctx.consumer_tidx),
            ctx.mma_S.get_slice(0),
            ctx.m_block * config.tile_m,
            n_block * config.tile_n,
            ctx.seqlens,
            ctx.causal,
        )
    softmax.online_step(mn_view(acc_S), fragments.stats, fragments.rescale, ctx.scale_log2)
    softmax.rescale_rows(mn_view(fragments.acc_O), fragments.rescale)
    tOrP = probabilities_operand(ctx, fragments, acc_S)

    ctx.pipelines.V.consumer_wait(state_KV)
    # O += P V
    wgmma.gemm(
        ctx.mma_O,
        fragments.acc_O,
        tOrP,
        fragments.tOrVt[None, None, None, stage],
        accumulate=True,
    )
    warpgroup.wait_group(0)
    ctx.pipelines.V.consumer_release(state_KV)
    state_KV.advance()
    return state_KV


@cute.jit
def probabilities_operand(ctx: MmaContext, fragments: Fragments, acc_S: cute.Tensor):
    """P in the input dtype as the A operand of O += P V: in registers, or in its rows of sP."""
    dtype = ctx.smem.sQ.element_type
    acc_P = operand_a_view(acc_S)
    rP = cute.make_rmem_tensor_like(acc_P, dtype)
    rP.store(acc_P.load().to(dtype))
    tOrP = rP
    if cutlass.const_expr(ctx.config.p_operand is POperand.SHARED):
        copies.store_accumulator(ctx.mma_S, rP, ctx.smem.sP[None, None, 0], ctx.consumer_tidx)
        # wgmma reads through the async proxy; a warp's rows of A are written by that warp alone.
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        tOrP = fragments.tOrP
    return tOrP
