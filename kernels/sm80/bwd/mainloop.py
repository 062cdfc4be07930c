"""Five GEMMs per query tile, with keys as the rows of four of them.

S^T  = K Q^T             P^T  = 2^(c S^T - LSE)
dP^T = V dO^T            dS^T = P^T (dP^T - delta)
dV  += P^T dO
dK  += dS^T Q
dQ   = dS K              added to fp32 in global memory
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32
from cutlass.cute.nvgpu import LoadCacheMode, cpasync

from hopperflash.plan.config import BackwardConfigSm80, POperand

from ...common import gradients, softmax, turns
from ...common.band import Band
from ...common.layouts import convert_operand_a, mn_view, operand_a_view
from ...common.mask import mask_transposed_scores
from ...common.sequence import Rows, sequence_rows
from ...common.tiles import KeyTile
from ...common.work import anew
from .. import copies, cp_async
from ..mma import gemm, smem_operand, transposed

_FLOATS = 4  # in 16 bytes


class SmemTensors(NamedTuple):
    """The operands in shared memory."""

    sK: cute.Tensor  # (tile_n, head_dim, 1), later dK
    sV: cute.Tensor  # (tile_n, head_dim_v, 1), later dV
    sQ: cute.Tensor  # (tile_m, head_dim, stages)
    sdO: cute.Tensor  # (tile_m, head_dim_v, stages)
    sSt: cute.Tensor  # (tile_n, tile_m, 1): P^T where shared, then dS^T
    sLSE: cute.Tensor  # (tile_m, stages) fp32
    sDelta: cute.Tensor  # (tile_m, stages) fp32


@dataclass(frozen=True)
class TiledMmas:
    """One tiled MMA for each arrangement of warps."""

    scores: cute.TiledMma  # S^T, dP^T
    keys: cute.TiledMma  # dV, dK
    queries: cute.TiledMma  # dQ


class KernelOperands(NamedTuple):
    """The tensors as the kernel sees them."""

    mQ: cute.Tensor  # (batch, seqlen_q, heads_q, head_dim)
    mK: cute.Tensor  # (batch, seqlen_k, heads_k, head_dim)
    mV: cute.Tensor  # (batch, seqlen_k, heads_k, head_dim_v)
    mdO: cute.Tensor  # (batch, seqlen_q, heads_q, head_dim_v)
    mLSE: cute.Tensor  # (batch, heads_q, padded rows) fp32, base 2
    mDelta: cute.Tensor  # (batch, heads_q, padded rows) fp32
    mdQ: cute.Tensor  # (batch, seqlen_q, heads_q, head_dim) fp32, added to
    mTurn: cute.Tensor  # (batch, heads_q, query blocks) int32
    mdK: cute.Tensor
    mdV: cute.Tensor


@dataclass(frozen=True)
class MainloopContext:
    """What the CTA needs for one key tile."""

    config: Constexpr[BackwardConfigSm80]
    band: Band
    capped: Constexpr[bool]
    mmas: TiledMmas
    copy_QK: cute.TiledCopy
    copy_dOV: cute.TiledCopy
    tensors: KernelOperands
    smem: SmemTensors
    tile: KeyTile
    tidx: Int32
    scales: softmax.Scales


@cute.jit
def mainloop(ctx: MainloopContext):
    """Returns (acc_dK, acc_dV), without the softmax scale.

    For every head of the group: query tiles that meet the diagonal or the end of the keys need a
    mask, those inside do not, and those at a window's far edge do.
    """
    config, tile, queries = ctx.config, ctx.tile, ctx.tile.queries
    accs = (
        zeros(ctx.mmas.keys, (config.tile_n, config.head_dim)),
        zeros(ctx.mmas.keys, (config.tile_n, config.head_dim_v)),
    )
    if queries.begin < queries.end:
        load_keys(ctx)
        for ahead in cutlass.range_constexpr(config.stages):
            load_queries(ctx, Int32(ahead))
        cute.arch.cp_async_wait_group(config.stages - 1)
        cute.arch.sync_threads()
    step = Int32(0)
    for g in cutlass.range(tile.group, unroll=1):
        head = tile.head_k * tile.group + g
        for m_block in cutlass.range(queries.begin, queries.unmasked_begin, unroll=1):
            one_query_block(ctx, accs, step, (head, m_block), masked=True)
            step += 1
        for m_block in cutlass.range(queries.unmasked_begin, queries.unmasked_end, unroll=1):
            one_query_block(ctx, accs, step, (head, m_block), masked=False)
            step += 1
        if cutlass.const_expr(ctx.band.window):
            for m_block in cutlass.range(queries.unmasked_end, queries.end, unroll=1):
                one_query_block(ctx, accs, step, (head, m_block), masked=True)
                step += 1
    cute.arch.cp_async_wait_group(0)
    return accs


def zeros(mma: cute.TiledMma, shape: tuple[int, int]) -> cute.Tensor:
    """An accumulator of zeros."""
    acc = cute.make_rmem_tensor(mma.partition_shape_C(shape), Float32)
    acc.fill(0.0)
    return acc


@cute.jit
def load_keys(ctx: MainloopContext):
    """Start copying K and V of the CTA's key tile; they travel with the first query tile."""
    tile, tensors, smem = ctx.tile, ctx.tensors, ctx.smem
    sequence = tile.sequence
    keys = Rows(sequence.k.first, sequence.seqlens.k)
    gK = sequence_rows(tensors.mK, tile.head_k, sequence.batch, keys)
    gV = sequence_rows(tensors.mV, tile.head_k, sequence.batch, keys)
    cp_async.load_tile(ctx.copy_QK, ctx.tidx, gK, smem.sK[None, None, 0], tile.n_block)
    cp_async.load_tile(ctx.copy_dOV, ctx.tidx, gV, smem.sV[None, None, 0], tile.n_block)


def queries_of(tile: KeyTile) -> Rows:
    """The rows of Q, dO and dQ that count."""
    return Rows(tile.sequence.q.first, tile.sequence.seqlens.q)


@cute.jit
def load_queries(ctx: MainloopContext, step: Int32):
    """Start copying Q, dO and their statistics for a step; an empty group past the last step."""
    tile, tensors, smem, queries = ctx.tile, ctx.tensors, ctx.smem, ctx.tile.queries
    stage = step % ctx.config.stages
    blocks = queries.end - queries.begin
    if step < tile.group * blocks:
        head = tile.head_k * tile.group + step // blocks
        m_block = queries.begin + step % blocks
        batch, rows = tile.sequence.batch, queries_of(tile)
        gQ = sequence_rows(tensors.mQ, head, batch, rows)
        gdO = sequence_rows(tensors.mdO, head, batch, rows)
        cp_async.load_tile(ctx.copy_QK, ctx.tidx, gQ, smem.sQ[None, None, stage], m_block)
        cp_async.load_tile(ctx.copy_dOV, ctx.tidx, gdO, smem.sdO[None, None, stage], m_block)
        padded_block = tile.first_padded_block + m_block
        load_statistic(ctx, tensors.mLSE[batch, head, None], smem.sLSE[None, stage], padded_block)
        load_statistic(
            ctx, tensors.mDelta[batch, head, None], smem.sDelta[None, stage], padded_block
        )
    cute.arch.cp_async_commit_group()


@cute.jit
def load_statistic(ctx: MainloopContext, mX: cute.Tensor, sX: cute.Tensor, padded_block: Int32):
    """Start copying a tile's row statistic, 16 bytes a thread."""
    atom = cute.make_copy_atom(
        cpasync.CopyG2SOp(cache_mode=LoadCacheMode.GLOBAL), Float32, num_bits_per_copy=128
    )
    gX = cute.local_tile(mX, (ctx.config.tile_m,), (padded_block,))
    if ctx.tidx < ctx.config.tile_m // _FLOATS:
        vectors_g = cute.logical_divide(gX, cute.make_layout(_FLOATS))
        vectors_s = cute.logical_divide(sX, cute.make_layout(_FLOATS))
        cute.copy(atom, vectors_g[None, ctx.tidx], vectors_s[None, ctx.tidx])


@cute.jit
def one_query_block(
    ctx: MainloopContext,
    accs: tuple[cute.Tensor, cute.Tensor],
    step: Int32,
    coordinates: tuple[Int32, Int32],
    masked: Constexpr[bool],
):
    """Stream one query tile: adds to dK, dV and, in global memory, dQ."""
    config, smem = ctx.config, ctx.smem
    acc_dK, acc_dV = accs
    head, m_block = coordinates
    stage = step % config.stages
    mma, tidx = ctx.mmas.scores, ctx.tidx
    matrices = config.score_columns // 4  # two k-octets of each eight columns
    tile_nm = (config.tile_n, config.tile_m)
    acc_S, acc_dP = zeros(mma, tile_nm), zeros(mma, tile_nm)
    thr_mma = mma.get_slice(tidx)
    cSt = cute.make_identity_tensor(tile_nm)
    tScSt_mn = mn_view(thr_mma.partition_C(cSt))

    # S^T = K Q^T
    K = smem_operand(mma, tidx, smem.sK, "A", transpose=False)
    Q = smem_operand(mma, tidx, smem.sQ, "B", transpose=False, matrices=matrices)
    gemm(mma, acc_S, K.fragment, Q.fragment, (K, 0), (Q, stage))
    # dP^T = V dO^T
    V = smem_operand(mma, tidx, smem.sV, "A", transpose=False)
    dO = smem_operand(mma, tidx, smem.sdO, "B", transpose=False, matrices=matrices)
    gemm(mma, acc_dP, V.fragment, dO.fragment, (V, 0), (dO, stage))
    if cutlass.const_expr(ctx.capped):
        softmax.cap_scores(mn_view(acc_S), ctx.scales)
    if cutlass.const_expr(masked):
        mask_transposed_scores(
            acc_S,
            cSt,
            thr_mma,
            mma.get_slice(0),
            m_block * config.tile_m,
            # Which queries a key sees would be kept over the loop for every row of a thread.
            anew(ctx.tile.n_block * config.tile_n),
            ctx.tile.sequence.seqlens,
            ctx.band,
        )
    sLSE, sDelta = smem.sLSE[None, stage], smem.sDelta[None, stage]
    gradients.probabilities(mn_view(acc_S), tScSt_mn, sLSE, ctx.scales.log2)
    gradients.score_gradients(
        mn_view(acc_S), mn_view(acc_dP), tScSt_mn, sLSE, sDelta, ctx.scales, ctx.capped
    )

    # dV += P^T dO
    if cutlass.const_expr(config.needs("dv")):
        multiply_scores(ctx, acc_dV, acc_S, smem.sdO, stage)
        if cutlass.const_expr(config.p_operand is POperand.SHARED):
            # P^T is read before dS^T takes its place.
            cute.arch.sync_threads()
    if cutlass.const_expr(config.needs("dq") and config.p_operand is POperand.REGISTERS):
        copies.store_converted(mma, acc_dP, smem.sSt[None, None, 0], tidx)
    # dK += dS^T Q
    if cutlass.const_expr(config.needs("dk")):
        multiply_scores(ctx, acc_dK, acc_dP, smem.sQ, stage)
    elif cutlass.const_expr(config.needs("dq") and config.p_operand is POperand.SHARED):
        copies.store_converted(mma, acc_dP, smem.sSt[None, None, 0], tidx)
    # dQ = dS K
    if cutlass.const_expr(config.needs("dq")):
        cute.arch.sync_threads()
        acc_dQ = multiply_dS(ctx)
        next_stage(ctx, step)
        add_dQ(ctx, acc_dQ, head, m_block)
    else:
        next_stage(ctx, step)


@cute.jit
def next_stage(ctx: MainloopContext, step: Int32):
    """Wait for the next step's stage; nobody reads this step's any more, so refill it.

    This comes before dQ is added: the additions then overlap the next step, and the barrier keeps
    the compiler from computing their addresses in the middle of the GEMM, which would spill.
    """
    cute.arch.cp_async_wait_group(ctx.config.stages - 2)
    cute.arch.sync_threads()
    load_queries(ctx, step + ctx.config.stages)


@cute.jit
def multiply_scores(
    ctx: MainloopContext,
    acc: cute.Tensor,
    acc_St: cute.Tensor,  # P^T or dS^T in fp32
    sX: cute.Tensor,  # (tile_m, columns, stages): dO or Q
    stage: Int32,
):
    """acc += scores X, the scores in the input dtype from registers or through shared memory."""
    mma, tidx = ctx.mmas.keys, ctx.tidx
    Xt = smem_operand(mma, tidx, transposed(sX), "B", transpose=True)
    if cutlass.const_expr(ctx.config.p_operand is POperand.REGISTERS):
        view = operand_a_view(acc_St)
        operand = cute.make_rmem_tensor_like(view, sX.element_type)
        convert_operand_a(view, operand)
        gemm(mma, acc, operand, Xt.fragment, None, (Xt, stage))
    else:
        copies.store_converted(ctx.mmas.scores, acc_St, ctx.smem.sSt[None, None, 0], tidx)
        cute.arch.sync_threads()
        St = smem_operand(mma, tidx, ctx.smem.sSt, "A", transpose=False)
        gemm(mma, acc, St.fragment, Xt.fragment, (St, 0), (Xt, stage))


@cute.jit
def multiply_dS(ctx: MainloopContext):
    """Returns acc_dQ = dS K of one query tile."""
    config, smem, mma = ctx.config, ctx.smem, ctx.mmas.queries
    acc_dQ = zeros(mma, (config.tile_m, config.head_dim))
    dS = smem_operand(mma, ctx.tidx, transposed(smem.sSt), "A", transpose=True)
    Kt = smem_operand(mma, ctx.tidx, transposed(smem.sK), "B", transpose=True)
    gemm(mma, acc_dQ, dS.fragment, Kt.fragment, (dS, 0), (Kt, 0))
    return acc_dQ


@cute.jit
def add_dQ(ctx: MainloopContext, acc_dQ: cute.Tensor, head: Int32, m_block: Int32):
    """Add a tile to dQ, element by element in fp32; in turn where the order is fixed."""
    config, tile, tidx, mma = ctx.config, ctx.tile, ctx.tidx, ctx.mmas.queries
    counter = ctx.tensors.mTurn.iterator.toint()
    if cutlass.const_expr(config.deterministic):
        counter = cute.domain_offset(
            (tile.sequence.batch, head, tile.first_padded_block + m_block), ctx.tensors.mTurn
        ).iterator.toint()
        if tidx == 0:
            turn = turns.turn_of(tile, m_block, ctx.band, config.tile_m, config.tile_n)
            turns.wait_for_turn(counter, turn)
        cute.arch.sync_threads()
    # From the tensor's beginning: a pointer to the sequence's rows would keep two registers.
    mdQ = ctx.tensors.mdQ[tile.sequence.batch, None, head, None]
    rows = queries_of(tile)
    cdQ = cute.make_identity_tensor((config.tile_m, config.head_dim))
    tdQcdQ_mn = mn_view(mma.get_slice(tidx).partition_C(cdQ))
    acc_dQ_mn = mn_view(acc_dQ)
    for r in cutlass.range_constexpr(cute.size(acc_dQ_mn, mode=[0])):
        row = m_block * config.tile_m + tdQcdQ_mn[r, 0][0]
        if row < rows.count:
            for c in cutlass.range_constexpr(cute.size(acc_dQ_mn, mode=[1])):
                column = tdQcdQ_mn[r, c][1]
                if column < mdQ.shape[1]:
                    element = cute.domain_offset((rows.first + row, column), mdQ).iterator
                    cute.arch.red(
                        element, acc_dQ_mn[r, c], op="add", dtype="f32", sem="relaxed", scope="gpu"
                    )
    if cutlass.const_expr(config.deterministic):
        cute.arch.fence_acq_rel_gpu()
        cute.arch.sync_threads()
        if tidx == 0:
            turns.pass_turn(counter)
