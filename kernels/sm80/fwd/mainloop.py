"""S = Q K^T, streaming softmax, O += P V, with K and V blocks in a ring of cp.async stages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32

from hopperflash.plan.config import ForwardConfigSm80

from ...common import softmax
from ...common.band import Band, Seqlens
from ...common.block_range import BlockRange
from ...common.layouts import convert_operand_a, mn_view, operand_a_view
from ...common.mask import mask_scores_by_compares
from .. import cp_async
from ..mma import SmemOperand, gemm, load_fragment, smem_operand, transposed


class SmemTensors(NamedTuple):
    """The operands in shared memory."""

    sQ: cute.Tensor  # (tile_m, head_dim, 1), later O
    sK: cute.Tensor  # (tile_n, head_dim, stages)
    sV: cute.Tensor  # (tile_n, head_dim_v, stages)


@dataclass(frozen=True)
class MainloopContext:
    """What the CTA needs for one output tile."""

    config: Constexpr[ForwardConfigSm80]
    band: Band
    capped: Constexpr[bool]
    mma: cute.TiledMma
    copy_QK: cute.TiledCopy
    copy_V: cute.TiledCopy
    gQ: cute.Tensor  # (group, seqlen_q, head_dim) of the sequence
    gK: cute.Tensor  # (seqlen_k, head_dim)
    gV: cute.Tensor  # (seqlen_k, head_dim_v)
    smem: SmemTensors
    blocks: BlockRange
    seqlens: Seqlens
    m_block: Int32
    tidx: Int32
    scales: softmax.Scales


@dataclass(frozen=True)
class Fragments:
    """A thread's operands and accumulators."""

    Q: SmemOperand
    K: SmemOperand
    Vt: SmemOperand
    acc_O: cute.Tensor  # (MMA, MMA_M, MMA_N)
    stats: softmax.RowStats
    rescale: softmax.Rescale


@cute.jit
def mainloop(ctx: MainloopContext):
    """Returns (acc_O, stats): the unnormalised output and the row statistics.

    From the last key block down: those that meet the diagonal or the end need a mask, those inside
    do not, and those at a window's far edge do.
    """
    config, blocks = ctx.config, ctx.blocks
    fragments = make_fragments(ctx)
    if blocks.begin < blocks.end:
        cp_async.load_heads(ctx.copy_QK, ctx.tidx, ctx.gQ, ctx.smem.sQ[None, None, 0], ctx.m_block)
        # Q travels with the first K.
        for ahead in cutlass.range_constexpr(config.stages_kv - 1):
            load_block(ctx, Int32(ahead))
        if cutlass.const_expr(config.q_in_registers):
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_threads()
            load_fragment(fragments.Q, 0)
    first_unmasked = blocks.end - blocks.unmasked_end
    past_unmasked = blocks.end - blocks.unmasked_begin
    for step in cutlass.range(first_unmasked, unroll=1):
        one_key_block(ctx, fragments, step, masked=True)
    for step in cutlass.range(first_unmasked, past_unmasked, unroll=1):
        one_key_block(ctx, fragments, step, masked=False)
    if cutlass.const_expr(ctx.band.window):
        for step in cutlass.range(past_unmasked, blocks.end - blocks.begin, unroll=1):
            one_key_block(ctx, fragments, step, masked=True)
    cute.arch.cp_async_wait_group(0)
    return fragments.acc_O, fragments.stats


def make_fragments(ctx: MainloopContext) -> Fragments:
    """Operand fragments and accumulators; those of O start at zero."""
    config, mma, tidx, smem = ctx.config, ctx.mma, ctx.tidx, ctx.smem
    acc_O = cute.make_rmem_tensor(
        mma.partition_shape_C((config.tile_m, config.head_dim_v)), Float32
    )
    acc_O.fill(0.0)
    rows = cute.size(mn_view(acc_O), mode=[0])
    return Fragments(
        Q=smem_operand(mma, tidx, smem.sQ, "A", transpose=False),
        K=smem_operand(mma, tidx, smem.sK, "B", transpose=False),
        Vt=smem_operand(mma, tidx, transposed(smem.sV), "B", transpose=True),
        acc_O=acc_O,
        stats=softmax.make_row_stats(rows),
        rescale=softmax.make_rescale(rows),
    )


@cute.jit
def load_block(ctx: MainloopContext, step: Int32):
    """Start copying the K and V of a step, as two groups; empty groups past the last step."""
    stage = step % ctx.config.stages_kv
    n_block = ctx.blocks.end - 1 - step
    if n_block >= ctx.blocks.begin:
        cp_async.load_tile(ctx.copy_QK, ctx.tidx, ctx.gK, ctx.smem.sK[None, None, stage], n_block)
    cute.arch.cp_async_commit_group()
    if n_block >= ctx.blocks.begin:
        cp_async.load_tile(ctx.copy_V, ctx.tidx, ctx.gV, ctx.smem.sV[None, None, stage], n_block)
    cute.arch.cp_async_commit_group()


@cute.jit
def one_key_block(ctx: MainloopContext, fragments: Fragments, step: Int32, masked: Constexpr[bool]):
    """Stream one K/V block through the row statistics and the output numerator."""
    config, mma = ctx.config, ctx.mma
    stages = config.stages_kv
    stage = step % stages
    n_block = ctx.blocks.end - 1 - step
    acc_S = cute.make_rmem_tensor(mma.partition_shape_C((config.tile_m, config.tile_n)), Float32)
    acc_S.fill(0.0)

    # This step's V and both groups of the steps ahead may still be on their way.
    cute.arch.cp_async_wait_group(2 * (stages - 2) + 1)
    cute.arch.sync_threads()
    # Everyone has finished the step before, whose stage comes next.
    load_block(ctx, step + stages - 1)
    # S = Q K^T
    load_Q: Any = None if config.q_in_registers else (fragments.Q, 0)
    gemm(mma, acc_S, fragments.Q.fragment, fragments.K.fragment, load_Q, (fragments.K, stage))
    if cutlass.const_expr(ctx.capped):
        softmax.cap_scores(mn_view(acc_S), ctx.scales)
    if cutlass.const_expr(masked):
        mask_scores_by_compares(
            acc_S,
            cute.make_identity_tensor((config.tile_m, config.tile_n)),
            mma.get_slice(ctx.tidx),
            mma.get_slice(0),
            ctx.m_block * config.queries,
            n_block * config.tile_n,
            ctx.seqlens,
            ctx.band,
        )
    softmax.online_step(mn_view(acc_S), fragments.stats, fragments.rescale, ctx.scales.log2)
    softmax.rescale_where_needed(mn_view(fragments.acc_O), fragments.rescale)
    acc_P = operand_a_view(acc_S)
    tOrP = cute.make_rmem_tensor_like(acc_P, ctx.smem.sV.element_type)
    convert_operand_a(acc_P, tOrP)

    cute.arch.cp_async_wait_group(2 * (stages - 1))
    cute.arch.sync_threads()
    # O += P V
    gemm(mma, fragments.acc_O, tOrP, fragments.Vt.fragment, None, (fragments.Vt, stage))
