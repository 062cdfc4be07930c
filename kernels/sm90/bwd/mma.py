"""The consumer warpgroups: five GEMMs per query tile, with keys as the rows of four of them, or
with `query_rows` as the columns: then those four are transposed.

S^T  = K Q^T             P^T  = 2^(c S^T - LSE)
dP^T = V dO^T            dS^T = P^T (dP^T - delta)
dV  += P^T dO
dQ   = dS K              added to fp32 sums in global memory (`add_dq`); or dQ^T = K^T dS^T
dK  += dS^T Q
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, Int64, pipeline
from cutlass.cute.nvgpu import warpgroup

from hopperflash.plan.config import BackwardConfig, POperand

from ...common import gradients, softmax
from ...common.mask import existing_keys
from ...common.tiles import KeyTile
from ...common.work import anew
from .. import wgmma
from ..clusters import release
from ..rings import consumer_state
from .add_dq import (
    NO_TURN,
    add_dQ,
    next_turn,
    pass_last_turn,
    thread_sums,
)
from .context import MmaContext
from .load import loaded_queries, loads_keys
from .scores import (
    hand_over,
    hide_scores,
    keep_P,
    keys_by_queries,
    masks_keys,
    score_coordinates,
)

_NO_BLOCK_BITS = 30  # no tensor has so many queries that these bits of a block's number are set


@dataclass(frozen=True)
class Fragments:
    """A warpgroup's operands (MMA, MMA_M or MMA_N, MMA_K, stages) and accumulators."""

    tSrK: cute.Tensor
    tSrQ: cute.Tensor
    tdPrV: cute.Tensor
    tdPrdO: cute.Tensor
    tdVrPt: Any  # descriptors of sPt, or None where P^T stays in registers
    tdVrdOt: cute.Tensor
    tdKrdSt: Any  # descriptors of sdSt, or None where dS^T stays in registers
    tdKrQt: cute.Tensor
    tdQrdS: Any  # None for a warpgroup that leaves dQ to others
    tdQrKt: Any
    acc_dV: cute.Tensor
    acc_dK: cute.Tensor


@dataclass(frozen=True)
class HeadContext:
    """What all steps over the query tiles of a head have in common."""

    mma: MmaContext
    add: Any  # AddContext, or None for a warpgroup that leaves dQ to others
    tile: KeyTile
    fragments: Fragments
    existing_keys: Any  # a word a row of a thread; None where they are masked
    number: Int32
    sums: Any  # `thread_sums`


class States(NamedTuple):
    """Where a warpgroup is in the rings."""

    KV: pipeline.PipelineState
    Q: pipeline.PipelineState


def first_states(config: BackwardConfig) -> States:
    """At the first stages of all rings."""
    return States(KV=consumer_state(1), Q=consumer_state(config.stages))


@cute.jit
def mma(ctx: MmaContext, add: Any, tile: KeyTile, states: States):
    """Returns (acc_dK, acc_dV, states), without the softmax scale; `add` is an AddContext, or None
    for a warpgroup that leaves dQ to others.

    For every head of the group: query tiles that meet the diagonal need a mask, those inside do
    not, and those at a window's far edge do.
    """
    queries, fragments = tile.queries, make_fragments(ctx, adds_dQ=add is not None)
    counter, existing = Int64(NO_TURN), None
    if cutlass.const_expr(not masks_keys(ctx.config, ctx.band.kind)):
        keys = tile.sequence.seqlens.k - tile.n_block * ctx.config.tile_n
        existing = existing_keys(score_coordinates(ctx), keys)
    if loads_keys(ctx.config, tile):
        ctx.pipelines.KV.consumer_wait(states.KV)
    for g in cutlass.range(tile.group, unroll=1):
        head = tile.head_k * tile.group + g
        sums = thread_sums(add, tile, head) if add is not None else None
        head_context = HeadContext(ctx, add, tile, fragments, existing, head, sums)
        loaded = loaded_queries(ctx.config, ctx.band, tile)
        states = pass_over(ctx, states, loaded.begin, queries.begin)
        for m_block in cutlass.range(queries.begin, queries.unmasked_begin, unroll=1):
            states, counter = one_query_block(head_context, states, counter, m_block, masked=True)
        for m_block in cutlass.range(queries.unmasked_begin, queries.unmasked_end, unroll=1):
            states, counter = one_query_block(head_context, states, counter, m_block, masked=False)
        if cutlass.const_expr(ctx.band.window):
            for m_block in cutlass.range(queries.unmasked_end, queries.end, unroll=1):
                states, counter = one_query_block(
                    head_context, states, counter, m_block, masked=True
                )
        if cutlass.const_expr(ctx.band.window):
            states = pass_over(ctx, states, queries.end, loaded.end)
    if cutlass.const_expr(add is not None and ctx.config.deterministic):
        pass_last_turn(add, counter)
    return fragments.acc_dK, fragments.acc_dV, states


@cute.jit
def pass_over(ctx: MmaContext, states: States, begin: Int32, end: Int32):
    """Release blocks that see only other tiles of the cluster."""
    if cutlass.const_expr(ctx.config.cluster_n > 1):
        ring = ctx.pipelines.Q
        for _ in cutlass.range(begin, end, unroll=1):
            # A stage is released once it is full: before that, its barrier is in an earlier phase.
            ring.consumer_wait(states.Q)
            release(ring, states.Q, ctx.releases)
            states.Q.advance()
    return states


def make_fragments(ctx: MmaContext, adds_dQ: bool) -> Fragments:
    """Shared-memory descriptors of the warpgroup's operands; accumulators start at zero."""
    config, smem, mmas = ctx.config, ctx.smem, ctx.mmas
    warpgroup_idx = cute.arch.make_warp_uniform(ctx.consumer_tidx // wgmma.THREADS_PER_WARPGROUP)

    def operand_A(mma: cute.TiledMma, sX: Any, place: Any = warpgroup_idx) -> Any:
        wg_mma = wgmma.warpgroup_slice(mma, place)
        return wg_mma.make_fragment_A(wg_mma.partition_A(sX))

    def operand_B(mma: cute.TiledMma, sX: Any, place: Any = warpgroup_idx) -> Any:
        wg_mma = wgmma.warpgroup_slice(mma, place)
        return wg_mma.make_fragment_B(wg_mma.partition_B(sX))

    def operands(mma: cute.TiledMma, keys_side: Any, other_side: Any) -> tuple[Any, Any]:
        sA, sB = config.oriented(keys_side, other_side)
        rA = operand_A(mma, sA) if sA is not None else None
        return config.oriented(rA, operand_B(mma, sB))

    def accumulator(mma: cute.TiledMma, head_dim: int) -> cute.Tensor:
        shape = mma.partition_shape_C(config.oriented(config.tile_n, head_dim))
        acc = cute.make_rmem_tensor(shape, Float32)
        acc.fill(0.0)
        return acc

    shared_P = config.p_operand is POperand.SHARED
    tdQrdS = tdQrKt = None
    if adds_dQ and config.dq_swap_ab:
        tdQrdS, tdQrKt = operand_B(mmas.dQ, smem.sdS, 0), operand_A(mmas.dQ, smem.sKt, 0)
    elif adds_dQ:
        tdQrdS, tdQrKt = operand_A(mmas.dQ, smem.sdS), operand_B(mmas.dQ, smem.sKt)
    tSrK, tSrQ = operands(mmas.S, smem.sK, smem.sQ)
    tdPrV, tdPrdO = operands(mmas.S, smem.sV, smem.sdO)
    tdVrPt, tdVrdOt = operands(mmas.dV, smem.sPt, smem.sdOt)
    tdKrdSt, tdKrQt = operands(mmas.dK, smem.sdSt if shared_P else None, smem.sQt)
    return Fragments(
        tSrK=tSrK,
        tSrQ=tSrQ,
        tdPrV=tdPrV,
        tdPrdO=tdPrdO,
        tdVrPt=tdVrPt,
        tdVrdOt=tdVrdOt,
        tdKrdSt=tdKrdSt,
        tdKrQt=tdKrQt,
        tdQrdS=tdQrdS,
        tdQrKt=tdQrKt,
        acc_dV=accumulator(mmas.dV, config.head_dim_v),
        acc_dK=accumulator(mmas.dK, config.head_dim),
    )


@cute.jit
def one_query_block(
    head: HeadContext,
    states: States,
    counter: Int64,  # of the turn that the step before leaves to be passed on
    m_block: Int32,
    masked: Constexpr[bool],
):
    """Stream one query tile: adds to dK, dV and, in global memory, dQ."""
    ctx, fragments, tile = head.mma, head.fragments, head.tile
    config, mmas, stage = ctx.config, ctx.mmas, states.Q.index
    shape = mmas.S.partition_shape_C(config.oriented(config.tile_n, config.tile_m))
    acc_S = cute.make_rmem_tensor(shape, Float32)
    acc_dP = cute.make_rmem_tensor(shape, Float32)
    acc_St_mn, acc_dPt_mn = keys_by_queries(config, acc_S), keys_by_queries(config, acc_dP)
    tScSt_mn = score_coordinates(ctx)
    tSrQ, tdPrdO = (t[None, None, None, stage] for t in (fragments.tSrQ, fragments.tdPrdO))
    nowhere = anew(m_block) >> _NO_BLOCK_BITS
    tSrK, tdPrV = (wgmma.at_offset(t, nowhere) for t in (fragments.tSrK, fragments.tdPrV))

    # S^T = K Q^T, dP^T = V dO^T
    ctx.pipelines.Q.consumer_wait(states.Q)
    wgmma.gemm(mmas.S, acc_S, *config.oriented(tSrK, tSrQ), accumulate=False)
    wgmma.gemm(mmas.S, acc_dP, *config.oriented(tdPrV, tdPrdO), accumulate=False, fence=False)
    warpgroup.wait_group(1)
    if cutlass.const_expr(ctx.capped):
        softmax.cap_scores(acc_St_mn, ctx.scales)
    hides_keys = masked and not masks_keys(config, ctx.band.kind)
    if cutlass.const_expr(masked and not hides_keys):
        hide_scores(ctx, acc_S, m_block, tile)
    sLSE, sDelta = ctx.smem.sLSE[None, stage], ctx.smem.sDelta[None, stage]
    gradients.probabilities(acc_St_mn, tScSt_mn, sLSE, ctx.scales.log2)
    if cutlass.const_expr(config.keeps_P):
        keep_P(ctx, acc_S)
        tdVrPt = wgmma.at_offset(fragments.tdVrPt, nowhere)
        multiply_dV(head, tdVrPt, stage)
    warpgroup.wait_group(1 if config.keeps_P else 0)
    gradients.score_gradients(acc_St_mn, acc_dPt_mn, tScSt_mn, sLSE, sDelta, ctx.scales, ctx.capped)
    if cutlass.const_expr(head.add is not None and config.deterministic):
        # What the step before added to dQ has been made by now, or nearly.
        cute.arch.fence_acq_rel_gpu()
    existing = head.existing_keys if hides_keys else None
    operands = hand_over(ctx, acc_S, acc_dP, existing)
    counter = multiply_scores(head, operands, states, counter, m_block, nowhere)
    states.Q.advance()
    return states, counter


@cute.jit
def multiply_scores(
    head: HeadContext,
    operands: tuple[Any, Any],  # P^T, dS^T of `hand_over`
    states: States,
    counter: Int64,
    m_block: Int32,
    nowhere: Int32,  # 0, for `wgmma.at_offset`
):
    """dV += P^T dO, unless that has begun, dK += dS^T Q, dQ = dS K; releases the query tile.

    Where all warpgroups have a part of dQ, it leaves while dK is computed. One that has all of it
    needs the registers of P, and computes it last, while the other begins with the next step.
    Of parts of the transpose one leaves while the next is computed.
    """
    ctx, fragments = head.mma, head.fragments
    config, mmas, stage = ctx.config, ctx.mmas, states.Q.index
    tdVrPt, tdKrdSt = operands
    if cutlass.const_expr(config.p_operand is POperand.SHARED):
        tdVrPt, tdKrdSt = (
            wgmma.at_offset(t, nowhere) for t in (fragments.tdVrPt, fragments.tdKrdSt)
        )
    tdKrQt = fragments.tdKrQt[None, None, None, stage]
    adds, alike = head.add is not None, config.dq_alike
    if cutlass.const_expr(config.needs("dv") and not config.keeps_P):
        multiply_dV(head, tdVrPt, stage)
    if cutlass.const_expr(adds and alike):
        acc_dQ = multiply_dQ(head, nowhere, 0)
    if cutlass.const_expr(config.needs("dk")):
        operands_dK = config.oriented(tdKrdSt, tdKrQt)
        wgmma.gemm(mmas.dK, fragments.acc_dK, *operands_dK, accumulate=True)
    if cutlass.const_expr(adds and alike):
        counter = next_turn(head.add, head.tile, head.number, m_block, counter)
        warpgroup.wait_group(1 if config.needs("dk") else 0)
        add_dQ(head.add, head.sums, m_block, acc_dQ, 0)
    if cutlass.const_expr(adds and not alike):
        parts = head.add.parts
        warpgroup.wait_group(1 if config.needs("dk") else 0)
        acc_dQ = multiply_dQ(head, nowhere, parts[0])
        counter = next_turn(head.add, head.tile, head.number, m_block, counter)
        warpgroup.wait_group(1)
        release(ctx.pipelines.Q, states.Q, ctx.releases)
        for i in cutlass.range_constexpr(1, len(parts)):
            next_dQ = multiply_dQ(head, nowhere, parts[i])
            warpgroup.wait_group(1)
            add_dQ(head.add, head.sums, m_block, acc_dQ, parts[i - 1])
            acc_dQ = next_dQ
        warpgroup.wait_group(0)
        add_dQ(head.add, head.sums, m_block, acc_dQ, parts[-1])
    else:
        warpgroup.wait_group(0)
        release(ctx.pipelines.Q, states.Q, ctx.releases)
    return counter


@cute.jit
def multiply_dV(head: HeadContext, tdVrPt: cute.Tensor, stage: Int32):
    """dV += P^T dO: in flight."""
    ctx, fragments = head.mma, head.fragments
    operands = ctx.config.oriented(tdVrPt, fragments.tdVrdOt[None, None, None, stage])
    wgmma.gemm(ctx.mmas.dV, fragments.acc_dV, *operands, accumulate=True)


@cute.jit
def multiply_dQ(head: HeadContext, nowhere: Int32, part: Constexpr[int]):
    """dQ = dS K, or a part of dQ^T = K^T dS^T: in flight."""
    mma_dQ, config = head.mma.mmas.dQ, head.mma.config
    acc_dQ = cute.make_rmem_tensor(mma_dQ.partition_shape_C(config.dq_tile), Float32)
    tdQrdS, tdQrKt = (
        wgmma.at_offset(t, nowhere) for t in (head.fragments.tdQrdS, head.fragments.tdQrKt)
    )
    if cutlass.const_expr(config.dq_swap_ab):
        tdQrKt = wgmma.row_block(tdQrKt, part)
        wgmma.gemm(mma_dQ, acc_dQ, tdQrKt, tdQrdS, accumulate=False)
    else:
        wgmma.gemm(mma_dQ, acc_dQ, tdQrdS, tdQrKt, accumulate=False)
    return acc_dQ
