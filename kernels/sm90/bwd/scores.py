"""The scores of a query tile in registers, S^T or with `query_rows` S: which element is which, what
is hidden, and their way into the GEMMs of dV, dK and dQ."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32

from hopperflash.plan.config import BackwardConfig, POperand
from hopperflash.problem.mask import MaskKind

from ...common.layouts import convert_operand_a, mn_view, operand_a_view
from ...common.mask import hide_keys, mask_keys_past_end, mask_scores, mask_transposed_scores
from ...common.tiles import KeyTile
from .. import copies
from .context import MmaContext
from .storage import consumers, own_warpgroup


def masks_keys(config: BackwardConfig, kind: MaskKind) -> bool:
    """Whether scores of keys past the end are masked: not in rows of which dS is zeroed instead."""
    return config.query_rows or kind is not MaskKind.FULL


def keys_by_queries(config: BackwardConfig, acc: cute.Tensor) -> cute.Tensor:
    """The (keys, queries) view of an accumulator of S^T or S, or of its partitioned coordinates."""
    view = mn_view(acc)
    mode = list(config.oriented(0, 1))
    return cute.make_tensor(view.iterator, cute.select(view.layout, mode=mode))


def score_coordinates(ctx: MmaContext) -> cute.Tensor:
    """(key, query) of the scores of a thread, as `keys_by_queries`."""
    config = ctx.config
    cSt = cute.make_identity_tensor((config.tile_n, config.tile_m))
    mode = list(config.oriented(0, 1))
    cX = cute.make_tensor(cSt.iterator, cute.select(cSt.layout, mode=mode))
    return keys_by_queries(config, ctx.mmas.S.get_slice(ctx.consumer_tidx).partition_C(cX))


@cute.jit
def hide_scores(ctx: MmaContext, acc_S: cute.Tensor, m_block: Int32, tile: KeyTile):
    """-inf for the scores of invisible keys."""
    config, mma = ctx.config, ctx.mmas.S
    cS = cute.make_identity_tensor(config.oriented(config.tile_n, config.tile_m))
    thr_mma = mma.get_slice(ctx.consumer_tidx)
    first_query, first_key = m_block * config.tile_m, tile.n_block * config.tile_n
    seqlens = tile.sequence.seqlens
    if cutlass.const_expr(config.query_rows and ctx.band.full):
        mask_keys_past_end(acc_S, cS, thr_mma, first_key, seqlens)
    elif cutlass.const_expr(config.query_rows):
        mask_scores(acc_S, cS, thr_mma, first_query, first_key, seqlens, ctx.band)
    else:
        mask_transposed_scores(
            acc_S, cS, thr_mma, mma.get_slice(0), first_query, first_key, seqlens, ctx.band
        )


@cute.jit
def keep_P(ctx: MmaContext, acc_P: cute.Tensor):
    """P in the input dtype in shared memory, for the GEMM of the same warpgroup: with `query_rows`
    nobody else needs what it has of the keys."""
    rP = to_operand(acc_P, ctx.smem.sK.element_type)
    # Nobody may still read P or dS of the step before.
    consumers(ctx.config).arrive_and_wait()
    store_scores(ctx, rP, (ctx.smem.sPt, ctx.smem.sP))
    # wgmma reads through the async proxy what the four warps wrote.
    cute.arch.fence_view_async_shared()
    own_warpgroup(ctx.consumer_tidx).arrive_and_wait()


@cute.jit
def hand_over(
    ctx: MmaContext,
    acc_P: cute.Tensor,
    acc_dS: cute.Tensor,
    existing: Any,  # `existing_keys` where some may not, else None
):
    """P, unless it is kept (None), and dS in the input dtype: in registers as A operands, which it
    returns, and in shared memory if a GEMM reads them there; dQ's always does.
    """
    config, dtype = ctx.config, ctx.smem.sK.element_type
    rP = to_operand(acc_P, dtype) if not config.keeps_P else None
    rdS = to_operand(acc_dS, dtype)
    if cutlass.const_expr(existing is not None):
        # What P has for the others ends in rows of dV that are not stored, or zeroed before that.
        hide_keys(rdS, existing)
    shared = config.p_operand is POperand.SHARED
    shares_P = shared and config.needs("dv") and not config.keeps_P
    shares_dS = config.needs("dq") or (shared and config.needs("dk"))
    everyone = consumers(config)
    if cutlass.const_expr((shares_P or shares_dS) and not config.keeps_P):
        # Nobody may still read P or dS of the step before: as `keep_P` has seen to.
        everyone.arrive_and_wait()
    if cutlass.const_expr(shares_P):
        store_scores(ctx, rP, (ctx.smem.sPt, ctx.smem.sP))
    if cutlass.const_expr(shares_dS):
        store_scores(ctx, rdS, (ctx.smem.sdSt, ctx.smem.sdS))
    if cutlass.const_expr(shares_P or shares_dS):
        # wgmma reads through the async proxy what all consumer warps wrote.
        cute.arch.fence_view_async_shared()
        everyone.arrive_and_wait()
    return rP, rdS


@cute.jit
def store_scores(ctx: MmaContext, fragment: cute.Tensor, views: tuple[cute.Tensor, cute.Tensor]):
    """P or dS, or its transpose, into memory that is seen as (tile_n, tile_m, 1) and transposed."""
    sX, _ = ctx.config.oriented(*views)
    copies.store_accumulator(
        ctx.mmas.S, fragment, sX[None, None, 0], ctx.consumer_tidx, ctx.config.query_rows
    )


@cute.jit
def to_operand(acc: cute.Tensor, dtype: Constexpr[type[cutlass.Numeric]]):
    """An accumulator in the input dtype, as A fragments of the next GEMM."""
    view = operand_a_view(acc)
    operand = cute.make_rmem_tensor_like(view, dtype)
    convert_operand_a(view, operand)
    return operand
