"""The consumer warpgroups: five GEMMs per query tile, with keys as the rows of four of them.

S^T  = K Q^T             P^T  = 2^(c S^T - LSE)
dP^T = V dO^T            dS^T = P^T (dP^T - delta)
dV  += P^T dO
dQ   = dS K              handed to the store warp
dK  += dS^T Q
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, pipeline
from cutlass.cute.nvgpu import warpgroup

from hopperflash.plan.config import BackwardConfig, POperand

from ...common import gradients, softmax
from ...common.band import Band
from ...common.layouts import convert_operand_a, mn_view, operand_a_view
from ...common.mask import mask_transposed_scores
from ...common.tiles import KeyTile
from .. import copies, wgmma
from .load import loads_keys
from .storage import Barrier, Pipelines, SmemTensors


class TiledMmas(NamedTuple):
    """One tiled MMA for each shape of result."""

    St: cute.TiledMma  # (tile_n, tile_m): S^T and dP^T
    dV: cute.TiledMma  # (tile_n, head_dim_v)
    dK: cute.TiledMma  # (tile_n, head_dim)
    dQ: cute.TiledMma  # (tile_m, head_dim)


@dataclass(frozen=True)
class MmaContext:
    """What a consumer warpgroup needs."""

    config: Constexpr[BackwardConfig]
    band: Band
    capped: Constexpr[bool]
    mmas: TiledMmas
    smem: SmemTensors
    pipelines: Pipelines
    consumer_tidx: Int32
    scales: softmax.Scales


@dataclass(frozen=True)
class Fragments:
    """A warpgroup's operands and accumulators."""

    tSrK: cute.Tensor
    tSrQ: cute.Tensor  # (MMA, MMA_N, MMA_K, stages_q)
    tdPrV: cute.Tensor
    tdPrdO: cute.Tensor  # (MMA, MMA_N, MMA_K, stages_do)
    tdVrPt: Any  # descriptors of sPt, or None where P^T stays in registers
    tdVrdOt: cute.Tensor  # (MMA, MMA_N, MMA_K, stages_do)
    tdKrdSt: Any  # descriptors of sdSt, or None where dS^T stays in registers
    tdKrQt: cute.Tensor  # (MMA, MMA_N, MMA_K, stages_q)
    tdQrdS: cute.Tensor
    tdQrKt: cute.Tensor
    acc_dV: cute.Tensor
    acc_dK: cute.Tensor


class States(NamedTuple):
    """Where a warpgroup is in the rings."""

    KV: pipeline.PipelineState
    Q: pipeline.PipelineState
    dO: pipeline.PipelineState


def first_states(config: BackwardConfig) -> States:
    """At the first stages of all rings."""
    consumer = pipeline.PipelineUserType.Consumer
    return States(
        KV=pipeline.make_pipeline_state(consumer, 1),
        Q=pipeline.make_pipeline_state(consumer, config.stages_q),
        dO=pipeline.make_pipeline_state(consumer, config.stages_do),
    )


@cute.jit
def mma(ctx: MmaContext, tile: KeyTile, states: States):
    """Returns (acc_dK, acc_dV, states), without the softmax scale.

    For every head of the group: query tiles that meet the diagonal need a mask, those inside do
    not, and those at a window's far edge do.
    """
    fragments, queries = make_fragments(ctx), tile.queries
    if loads_keys(ctx.config, tile):
        ctx.pipelines.KV.consumer_wait(states.KV)
    for _ in cutlass.range(tile.group, unroll=1):
        for m_block in cutlass.range(queries.begin, queries.unmasked_begin, unroll=1):
            states = one_query_block(ctx, tile, fragments, states, m_block, masked=True)
        for m_block in cutlass.range(queries.unmasked_begin, queries.unmasked_end, unroll=1):
            states = one_query_block(ctx, tile, fragments, states, m_block, masked=False)
        if cutlass.const_expr(ctx.band.window):
            for m_block in cutlass.range(queries.unmasked_end, queries.end, unroll=1):
                states = one_query_block(ctx, tile, fragments, states, m_block, masked=True)
    return fragments.acc_dK, fragments.acc_dV, states


def make_fragments(ctx: MmaContext) -> Fragments:
    """Shared-memory descriptors of the warpgroup's operands; accumulators start at zero."""
    config, smem, mmas = ctx.config, ctx.smem, ctx.mmas
    warpgroup_idx = cute.arch.make_warp_uniform(ctx.consumer_tidx // wgmma.THREADS_PER_WARPGROUP)

    def operand_A(mma: cute.TiledMma, sX: Any) -> Any:
        wg_mma = wgmma.warpgroup_slice(mma, warpgroup_idx)
        return wg_mma.make_fragment_A(wg_mma.partition_A(sX))[None, None, None, 0]

    def operand_B(mma: cute.TiledMma, sX: Any) -> Any:
        wg_mma = wgmma.warpgroup_slice(mma, warpgroup_idx)
        return wg_mma.make_fragment_B(wg_mma.partition_B(sX))

    def accumulator(mma: cute.TiledMma, head_dim: int) -> cute.Tensor:
        acc = cute.make_rmem_tensor(mma.partition_shape_C((config.tile_n, head_dim)), Float32)
        acc.fill(0.0)
        return acc

    shared_P = config.p_operand is POperand.SHARED
    return Fragments(
        tSrK=operand_A(mmas.St, smem.sK),
        tSrQ=operand_B(mmas.St, smem.sQ),
        tdPrV=operand_A(mmas.St, smem.sV),
        tdPrdO=operand_B(mmas.St, smem.sdO),
        tdVrPt=operand_A(mmas.dV, smem.sPt) if shared_P else None,
        tdVrdOt=operand_B(mmas.dV, smem.sdOt),
        tdKrdSt=operand_A(mmas.dK, smem.sdSt) if shared_P else None,
        tdKrQt=operand_B(mmas.dK, smem.sQt),
        tdQrdS=operand_A(mmas.dQ, smem.sdS),
        tdQrKt=operand_B(mmas.dQ, smem.sKt)[None, None, None, 0],
        acc_dV=accumulator(mmas.dV, config.head_dim_v),
        acc_dK=accumulator(mmas.dK, config.head_dim),
    )


@cute.jit
def one_query_block(
    ctx: MmaContext,
    tile: KeyTile,
    fragments: Fragments,
    states: States,
    m_block: Int32,
    masked: Constexpr[bool],
):
    """Stream one query tile: adds to dK and dV, and hands its dQ to the store warp."""
    config, mmas = ctx.config, ctx.mmas
    state_Q, state_dO = states.Q, states.dO
    stage_Q, stage_dO = state_Q.index, state_dO.index
    tile_nm = (config.tile_n, config.tile_m)
    acc_S = cute.make_rmem_tensor(mmas.St.partition_shape_C(tile_nm), Float32)
    acc_dP = cute.make_rmem_tensor(mmas.St.partition_shape_C(tile_nm), Float32)
    thr_mma_St = mmas.St.get_slice(ctx.consumer_tidx)
    cSt = cute.make_identity_tensor(tile_nm)
    tScSt_mn = mn_view(thr_mma_St.partition_C(cSt))

    # S^T = K Q^T
    ctx.pipelines.Q.consumer_wait(state_Q)
    wgmma.gemm(
        mmas.St, acc_S, fragments.tSrK, fragments.tSrQ[None, None, None, stage_Q], accumulate=False
    )
    # dP^T = V dO^T
    ctx.pipelines.dO.consumer_wait(state_dO)
    wgmma.gemm(
        mmas.St,
        acc_dP,
        fragments.tdPrV,
        fragments.tdPrdO[None, None, None, stage_dO],
        accumulate=False,
    )

    warpgroup.wait_group(1)
    if cutlass.const_expr(ctx.capped):
        softmax.cap_scores(mn_view(acc_S), ctx.scales)
    if cutlass.const_expr(masked):
        mask_transposed_scores(
            acc_S,
            cSt,
            thr_mma_St,
            mmas.St.get_slice(0),
            m_block * config.tile_m,
            tile.n_block * config.tile_n,
            tile.sequence.seqlens,
            ctx.band,
        )
    sLSE, sDelta = ctx.smem.sLSE[None, stage_Q], ctx.smem.sDelta[None, stage_dO]
    gradients.probabilities(mn_view(acc_S), tScSt_mn, sLSE, ctx.scales.log2)
    warpgroup.wait_group(0)
    gradients.score_gradients(
        mn_view(acc_S), mn_view(acc_dP), tScSt_mn, sLSE, sDelta, ctx.scales, ctx.capped
    )
    tdVrPt, tdKrdSt = operands_from_scores(ctx, fragments, acc_S, acc_dP)

    acc_dQ = cute.make_rmem_tensor(
        mmas.dQ.partition_shape_C((config.tile_m, config.head_dim)), Float32
    )
    # dV += P^T dO
    if cutlass.const_expr(config.needs("dv")):
        wgmma.gemm(
            mmas.dV,
            fragments.acc_dV,
            tdVrPt,
            fragments.tdVrdOt[None, None, None, stage_dO],
            accumulate=True,
        )
    # dQ = dS K
    if cutlass.const_expr(config.needs("dq")):
        wgmma.gemm(mmas.dQ, acc_dQ, fragments.tdQrdS, fragments.tdQrKt, accumulate=False)
    # dK += dS^T Q
    if cutlass.const_expr(config.needs("dk")):
        wgmma.gemm(
            mmas.dK,
            fragments.acc_dK,
            tdKrdSt,
            fragments.tdKrQt[None, None, None, stage_Q],
            accumulate=True,
        )
    # dK may stay in flight behind dV and dQ, unless it reads sdS: after the hand-over another
    # warpgroup may overwrite that.
    dK_in_flight = config.needs("dk") and config.p_operand is POperand.REGISTERS
    warpgroup.wait_group(1 if dK_in_flight else 0)
    ctx.pipelines.dO.consumer_release(state_dO)
    if cutlass.const_expr(config.needs("dq")):
        hand_over_dQ(ctx, acc_dQ)
    warpgroup.wait_group(0)
    ctx.pipelines.Q.consumer_release(state_Q)
    state_Q.advance()
    state_dO.advance()
    return states


@cute.jit
def operands_from_scores(
    ctx: MmaContext, fragments: Fragments, acc_P: cute.Tensor, acc_dS: cute.Tensor
):
    """P^T and dS^T in the input dtype as A operands: in registers, or in shared memory where the
    warpgroups split the columns; dS is always in shared memory where dQ is needed.
    """
    config, dtype = ctx.config, ctx.smem.sK.element_type
    rP, rdS = to_operand(acc_P, dtype), to_operand(acc_dS, dtype)
    tdVrPt, tdKrdSt = rP, rdS
    shared_P = config.p_operand is POperand.SHARED
    everyone = pipeline.NamedBarrier(
        barrier_id=int(Barrier.CONSUMERS), num_threads=consumer_threads(config)
    )
    if cutlass.const_expr(shared_P and not config.needs("dq")):
        # Nobody may still read the tile before. Where dQ is needed, its hand-over says so: every
        # consumer warp enters it with all GEMMs that read shared dS complete.
        everyone.arrive_and_wait()
    if cutlass.const_expr(shared_P):
        copies.store_accumulator(ctx.mmas.St, rP, ctx.smem.sPt[None, None, 0], ctx.consumer_tidx)
        tdVrPt, tdKrdSt = fragments.tdVrPt, fragments.tdKrdSt
    if cutlass.const_expr(shared_P or config.needs("dq")):
        copies.store_accumulator(ctx.mmas.St, rdS, ctx.smem.sdSt[None, None, 0], ctx.consumer_tidx)
        # wgmma reads through the async proxy what all consumer warps wrote.
        cute.arch.fence_view_async_shared()
        everyone.arrive_and_wait()
    return tdVrPt, tdKrdSt


@cute.jit
def hand_over_dQ(ctx: MmaContext, acc_dQ: cute.Tensor):
    """Put dQ into shared memory once the store warp has read the one before."""
    threads = consumer_threads(ctx.config) + cute.arch.WARP_SIZE
    pipeline.NamedBarrier(barrier_id=int(Barrier.DQ_EMPTY), num_threads=threads).arrive_and_wait()
    copies.store_fp32_accumulator(
        ctx.mmas.dQ, acc_dQ, ctx.smem.sdQ[None, None, 0], ctx.consumer_tidx
    )
    cute.arch.fence_view_async_shared()
    pipeline.NamedBarrier(barrier_id=int(Barrier.DQ_FULL), num_threads=threads).arrive()


def consumer_threads(config: BackwardConfig) -> int:
    """Threads of all consumer warpgroups."""
    return config.consumer_warpgroups * wgmma.THREADS_PER_WARPGROUP


@cute.jit
def to_operand(acc: cute.Tensor, dtype: Constexpr[type[cutlass.Numeric]]):
    """An accumulator in the input dtype, as A fragments of the next GEMM."""
    view = operand_a_view(acc)
    operand = cute.make_rmem_tensor_like(view, dtype)
    convert_operand_a(view, operand)
    return operand
