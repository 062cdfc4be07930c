"""The end of a key tile: dK and dV leave through the memory that K and V came in by."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32

from hopperflash.plan.config import BackwardConfig
from hopperflash.problem.mask import MaskKind

from ...common.layouts import mn_view
from ...common.tiles import KeyTile
from .. import copies, tma
from .context import TiledMmas
from .scores import masks_keys
from .storage import SmemTensors, consumers


@dataclass(frozen=True)
class EpilogueContext:
    """Where the gradients of a key tile go."""

    config: Constexpr[BackwardConfig]
    packed: Constexpr[bool]
    mask_kind: Constexpr[MaskKind]
    mmas: TiledMmas
    smem: SmemTensors
    tma_dK: tma.TmaTensor  # (seqlen_k, head_dim, heads_k, batch)
    tma_dV: tma.TmaTensor  # (seqlen_k, head_dim_v, heads_k, batch)
    consumer_tidx: Int32
    softmax_scale: Float32


@cute.jit
def epilogue(ctx: EpilogueContext, tile: KeyTile, acc_dK: cute.Tensor, acc_dV: cute.Tensor):
    """dK = softmax_scale acc_dK, and dV, for the keys that exist."""
    config, smem = ctx.config, ctx.smem
    everyone = consumers(config)
    # No warpgroup may still read K or V.
    everyone.arrive_and_wait()
    if cutlass.const_expr(config.needs("dk")):
        acc_dK.store(acc_dK.load() * ctx.softmax_scale)
        store_gradient(ctx, ctx.mmas.dK, acc_dK, (smem.sK, smem.sKt))
    if cutlass.const_expr(config.needs("dv")):
        if cutlass.const_expr(ctx.packed and not masks_keys(config, ctx.mask_kind)):
            zero_hidden_rows(ctx, tile, acc_dV)
        store_gradient(ctx, ctx.mmas.dV, acc_dV, (smem.sV, smem.sVt))
    # The TMA store reads through the async proxy what all consumer warps wrote.
    cute.arch.fence_view_async_shared()
    everyone.arrive_and_wait()
    warp_idx = cute.arch.make_warp_uniform(ctx.consumer_tidx // cute.arch.WARP_SIZE)
    if warp_idx == 0:
        if cutlass.const_expr(config.needs("dk")):
            store_tile(ctx, tile, ctx.tma_dK, smem.sK, config.head_dim)
        if cutlass.const_expr(config.needs("dv")):
            store_tile(ctx, tile, ctx.tma_dV, smem.sV, config.head_dim_v)
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=True)


@cute.jit
def store_gradient(
    ctx: EpilogueContext,
    mma: cute.TiledMma,
    acc: cute.Tensor,
    views: tuple[cute.Tensor, cute.Tensor],  # (tile_n, head_dim, 1), and of the transpose
):
    """dK or dV, or its transpose, to shared memory in the input dtype."""
    sX, _ = ctx.config.oriented(*views)
    copies.store_converted(mma, acc, sX[None, None, 0], ctx.consumer_tidx, ctx.config.query_rows)


@cute.jit
def zero_hidden_rows(ctx: EpilogueContext, tile: KeyTile, acc_dV: cute.Tensor):
    """Zeros for rows of a sequence that are no keys, where those of P were not masked: they are
    rows there."""
    config = ctx.config
    cdV = cute.make_identity_tensor((config.tile_n, config.head_dim_v))
    tdVcdV_mn = mn_view(ctx.mmas.dV.get_slice(ctx.consumer_tidx).partition_C(cdV))
    acc_dV_mn = mn_view(acc_dV)
    keys = tile.sequence.seqlens.k - tile.n_block * config.tile_n
    for r in cutlass.range_constexpr(cute.size(acc_dV_mn, mode=[0])):
        for c in cutlass.range_constexpr(cute.size(acc_dV_mn, mode=[1])):
            acc_dV_mn[r, c] = acc_dV_mn[r, c] if tdVcdV_mn[r, 0][0] < keys else Float32(0.0)


@cute.jit
def store_tile(
    ctx: EpilogueContext,
    tile: KeyTile,
    tma_X: tma.TmaTensor,
    sX: cute.Tensor,
    head_dim: Constexpr[int],
):
    """A whole (tile_n, head_dim) tile by TMA."""
    sequence = tile.sequence
    gX = cute.local_tile(
        tma.head_rows(tma_X, tile.head_k, sequence.batch, sequence.k, ctx.packed),
        (ctx.config.tile_n, head_dim),
        (tile.n_block, 0),
    )
    tXsX, tXgX = tma.partition(tma_X, sX, gX)
    cute.copy(tma_X.atom, tXsX[None, 0], tXgX)
