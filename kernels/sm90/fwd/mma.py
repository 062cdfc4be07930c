"""The consumer warpgroups: S = Q K^T, streaming softmax, O += P V.

A warpgroup keeps two GEMMs in flight: while its threads work on the softmax of block j, the tensor
cores multiply P V of block j - 1.

    S(0), softmax | S(j), PV(j-1) issued, S(j) awaited, softmax(j), PV(j-1) awaited, P(j) | PV(last)

Source: FlashAttention-3, arXiv 2407.08608, section 3.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, pipeline
from cutlass.cute.nvgpu import warpgroup

from hopperflash.plan.config import ForwardConfig, POperand

from ...common import softmax
from ...common.band import Band
from ...common.layouts import convert_operand_a, mn_view, operand_a_view
from ...common.mask import mask_scores
from ...common.tiles import QueryTile
from ...common.work import anew
from .. import copies, wgmma
from ..clusters import release
from ..rings import consumer_state
from .load import loaded_keys, loads_queries
from .storage import Barrier, Pipelines, SmemTensors


@dataclass(frozen=True)
class MmaContext:
    """What a consumer warpgroup needs."""

    config: Constexpr[ForwardConfig]
    band: Band
    capped: Constexpr[bool]
    mma_S: cute.TiledMma
    mma_O: cute.TiledMma
    smem: SmemTensors
    pipelines: Pipelines
    releases: Any  # Releases of a cluster, else None
    consumer_tidx: Int32
    scales: softmax.Scales
    turns: Any  # NamedBarriers of this warpgroup and of the next, or None


@dataclass(frozen=True)
class Fragments:
    """A warpgroup's operands and accumulators."""

    tSrQ: cute.Tensor  # (MMA, MMA_M, MMA_K)
    tSrK: cute.Tensor  # (MMA, MMA_N, MMA_K, stages)
    tOrVt: cute.Tensor  # (MMA, MMA_N, MMA_K, stages)
    rP: cute.Tensor  # (MMA, MMA_M, MMA_K) probabilities in the input dtype
    tOrP: cute.Tensor  # the operand of O += P V: rP, or descriptors of sP
    acc_O: cute.Tensor  # (MMA, MMA_M, MMA_N)
    stats: softmax.RowStats
    rescale: softmax.Rescale


class States(NamedTuple):
    """Where a warpgroup is in the rings; within a tile K runs one block ahead of V."""

    Q: pipeline.PipelineState
    K: pipeline.PipelineState
    V: pipeline.PipelineState


def first_states(config: ForwardConfig) -> States:
    """At the first stages of all rings."""
    stages = config.stages_kv
    return States(Q=consumer_state(1), K=consumer_state(stages), V=consumer_state(stages))


@cute.jit
def mma(ctx: MmaContext, tile: QueryTile, states: States):
    """Returns (acc_O, stats, states): the unnormalised output and the row statistics.

    From the last key block down: those that meet the diagonal or the end need a mask, those inside
    do not, and those at a window's far edge do.
    """
    fragments, blocks = make_fragments(ctx), tile.keys
    if cutlass.const_expr(ctx.config.cluster_m > 1):
        states = pass_over(ctx, tile, states)
    if loads_queries(ctx.config, tile):
        ctx.pipelines.Q.consumer_wait(states.Q)
    if blocks.begin < blocks.end:
        states = first_key_block(ctx, tile, fragments, states)
        for n_block in cutlass.range(blocks.end - 2, blocks.unmasked_end - 1, -1, unroll=1):
            states = one_key_block(ctx, tile, fragments, states, n_block, masked=True)
        # The first block has been visited, whether it needed its mask or not.
        unmasked_end = min(blocks.unmasked_end, blocks.end - 1)
        for n_block in cutlass.range(unmasked_end - 1, blocks.unmasked_begin - 1, -1, unroll=1):
            states = one_key_block(ctx, tile, fragments, states, n_block, masked=False)
        if cutlass.const_expr(ctx.band.window):
            for n_block in cutlass.range(blocks.unmasked_begin - 1, blocks.begin - 1, -1, unroll=1):
                states = one_key_block(ctx, tile, fragments, states, n_block, masked=True)
        # O += P V of the last block
        multiply_values(ctx, fragments, states.V)
        warpgroup.wait_group(0)
        release(ctx.pipelines.V, states.V, ctx.releases)
        states.V.advance()
    return fragments.acc_O, fragments.stats, states


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
    acc_P = operand_a_view(scores_accumulator(ctx))
    rP = cute.make_rmem_tensor_like(acc_P, smem.sQ.element_type)
    tOrP = rP
    if smem.sP is not None:
        tOrP = wg_mma_O.make_fragment_A(wg_mma_O.partition_A(smem.sP))[None, None, None, 0]
    return Fragments(
        tSrQ=wg_mma_S.make_fragment_A(wg_mma_S.partition_A(smem.sQ))[None, None, None, 0],
        tSrK=wg_mma_S.make_fragment_B(wg_mma_S.partition_B(smem.sK)),
        tOrVt=wg_mma_O.make_fragment_B(wg_mma_O.partition_B(smem.sVt)),
        rP=rP,
        tOrP=tOrP,
        acc_O=acc_O,
        stats=softmax.make_row_stats(rows),
        rescale=softmax.make_rescale(rows),
    )


def scores_accumulator(ctx: MmaContext) -> cute.Tensor:
    """An uninitialised accumulator of S: (MMA, MMA_M, MMA_N)."""
    shape = ctx.mma_S.partition_shape_C((ctx.config.tile_m, ctx.config.tile_n))
    return cute.make_rmem_tensor(shape, Float32)


@cute.jit
def first_key_block(ctx: MmaContext, tile: QueryTile, fragments: Fragments, states: States):
    """S and P of the last block, which may need a mask; no V has been multiplied yet."""
    acc_S = scores_accumulator(ctx)
    multiply_keys(ctx, fragments, states.K, acc_S)
    warpgroup.wait_group(0)
    release(ctx.pipelines.K, states.K, ctx.releases)
    cap_block(ctx, acc_S)
    mask_block(ctx, tile, acc_S, tile.keys.end - 1)
    update_rows(ctx, fragments, acc_S, masked=True)
    store_probabilities(ctx, fragments, acc_S)
    states.K.advance()
    return states


@cute.jit
def one_key_block(
    ctx: MmaContext,
    tile: QueryTile,
    fragments: Fragments,
    states: States,
    n_block: Int32,
    masked: Constexpr[bool],
):
    """S and P of a block, and behind its softmax the O += P V of the block before."""
    acc_S = scores_accumulator(ctx)
    if cutlass.const_expr(ctx.config.ping_pong):
        ctx.turns[0].arrive_and_wait()
    multiply_keys(ctx, fragments, states.K, acc_S)
    multiply_values(ctx, fragments, states.V)
    if cutlass.const_expr(ctx.config.ping_pong):
        ctx.turns[1].arrive()
    warpgroup.wait_group(1)
    release(ctx.pipelines.K, states.K, ctx.releases)
    cap_block(ctx, acc_S)
    if cutlass.const_expr(masked):
        mask_block(ctx, tile, acc_S, n_block)
    update_rows(ctx, fragments, acc_S, masked)
    # Neither O nor P may be touched while their GEMM runs.
    warpgroup.wait_group(0)
    release(ctx.pipelines.V, states.V, ctx.releases)
    softmax.rescale_where_needed(mn_view(fragments.acc_O), fragments.rescale)
    store_probabilities(ctx, fragments, acc_S)
    # V follows K, one block behind.
    behind = states.K.clone()
    states.K.advance()
    return States(states.Q, states.K, behind)


def make_turns(config: ForwardConfig, consumer_tidx: Int32) -> Any:
    """The barriers of this warpgroup and of the next, or None where GEMMs are issued in any order.

    In turns the softmax of a warpgroup falls into the GEMMs of the others. All have as many steps,
    and each passes the turn on as often as it has it.
    """
    if not config.ping_pong:
        return None
    own = consumer_tidx // wgmma.THREADS_PER_WARPGROUP
    following = (own + 1) % config.consumer_warpgroups
    # Kept in registers, where a barrier's number is read from.
    return tuple(
        pipeline.NamedBarrier(
            barrier_id=anew(int(Barrier.TURN) + warpgroup_idx),
            num_threads=2 * wgmma.THREADS_PER_WARPGROUP,
        )
        for warpgroup_idx in (own, following)
    )


@cute.jit
def begin_turns(ctx: MmaContext):
    """The first turn is the first warpgroup's: the last has nothing to issue before it."""
    last = ctx.config.consumer_warpgroups - 1
    if ctx.consumer_tidx >= last * wgmma.THREADS_PER_WARPGROUP:
        ctx.turns[1].arrive()


@cute.jit
def pass_over(ctx: MmaContext, tile: QueryTile, states: States):
    """Release the blocks before the tile's own, which only others of the cluster see."""
    pipelines = ctx.pipelines
    loaded = loaded_keys(ctx.config, ctx.band, tile)
    for _ in cutlass.range(loaded.end - tile.keys.end, unroll=1):
        # A stage is released once it is full: before that, its barrier is in an earlier phase.
        pipelines.K.consumer_wait(states.K)
        release(ctx.pipelines.K, states.K, ctx.releases)
        pipelines.V.consumer_wait(states.V)
        release(ctx.pipelines.V, states.V, ctx.releases)
        states.K.advance()
        states.V.advance()
    return states


@cute.jit
def multiply_keys(
    ctx: MmaContext, fragments: Fragments, state_K: pipeline.PipelineState, acc_S: cute.Tensor
):
    """Issue S = Q K^T."""
    ctx.pipelines.K.consumer_wait(state_K)
    tSrK = fragments.tSrK[None, None, None, state_K.index]
    wgmma.gemm(ctx.mma_S, acc_S, fragments.tSrQ, tSrK, accumulate=False)


@cute.jit
def multiply_values(ctx: MmaContext, fragments: Fragments, state_V: pipeline.PipelineState):
    """Issue O += P V."""
    ctx.pipelines.V.consumer_wait(state_V)
    tOrVt = fragments.tOrVt[None, None, None, state_V.index]
    wgmma.gemm(ctx.mma_O, fragments.acc_O, fragments.tOrP, tOrVt, accumulate=True)


@cute.jit
def update_rows(ctx: MmaContext, fragments: Fragments, acc_S: cute.Tensor, masked: Constexpr[bool]):
    """Probabilities in place of scores, the row statistics, and the factors of what was before.

    A mask takes so many instructions that their issue binds, and not the MUFU.
    """
    softmax.online_step(
        mn_view(acc_S),
        fragments.stats,
        fragments.rescale,
        ctx.scales.log2,
        ctx.config.factors_on_fma and not masked,
    )


@cute.jit
def cap_block(ctx: MmaContext, acc_S: cute.Tensor):
    """Scores become the tanh of what they are, where they are capped."""
    if cutlass.const_expr(ctx.capped):
        softmax.cap_scores(mn_view(acc_S), ctx.scales)


@cute.jit
def mask_block(ctx: MmaContext, tile: QueryTile, acc_S: cute.Tensor, n_block: Int32):
    """Scores of keys that a row does not see become -inf."""
    config = ctx.config
    mask_scores(
        acc_S,
        cute.make_identity_tensor((config.tile_m, config.tile_n)),
        ctx.mma_S.get_slice(ctx.consumer_tidx),
        tile.m_block * config.queries,
        n_block * config.tile_n,
        tile.sequence.seqlens,
        ctx.band,
    )


@cute.jit
def store_probabilities(ctx: MmaContext, fragments: Fragments, acc_P: cute.Tensor):
    """P in the input dtype as the A operand of O += P V: in registers, or in its rows of sP."""
    rP = fragments.rP
    convert_operand_a(operand_a_view(acc_P), rP)
    if cutlass.const_expr(ctx.config.p_operand is POperand.SHARED):
        copies.store_accumulator(ctx.mma_S, rP, ctx.smem.sP[None, None, 0], ctx.consumer_tidx)
        # wgmma reads through the async proxy; a warp's rows of A are written by that warp alone.
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
