"""The Ampere backward kernel: a CTA owns tiles of keys and values of one key head, one at a time.

It streams the query tiles that see its keys, of every query head of the group, so that dK and dV
are summed in registers and written once; dQ is added up in fp32 in global memory. Q, dO and their
row statistics travel through a ring of cp.async stages; all warps load, multiply and store.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Constexpr, Float32, Int32
from cutlass.memory import SmemAllocator

from hopperflash.plan.config import BackwardConfigSm80, Scheduler

from ...common import operands, softmax, turns
from ...common.attention_kernel import AttentionKernel
from ...common.band import Band, Seqlens
from ...common.dependent import wait_for_previous
from ...common.sequence import sequence_rows
from ...common.tiles import key_tile
from ...common.work import AssignedTile, Tiles, Walk, for_each_tile, grid, tile_number
from .. import copies, cp_async
from ..mma import smem_layout, tiled_mma
from .mainloop import KernelOperands, MainloopContext, SmemTensors, TiledMmas, mainloop

_ALIGNMENT = 128


@dataclass(frozen=True)
class TileContext:
    """What a CTA needs for its key tiles."""

    tensors: KernelOperands
    walk: Walk
    band: Band
    scales: softmax.Scales
    smem: SmemTensors


class BackwardSm80(AttentionKernel[BackwardConfigSm80]):
    """Gradients of exact attention for fp16 and bf16: dense or packed, GQA."""

    kind = "bwd_sm80"
    fake_operands = staticmethod(operands.backward_operands)

    @cute.jit
    def __call__(  # noqa: PLR0913, PLR0917 - one tensor each is what a launch takes
        self,
        mQ: cute.Tensor,  # (batch, seqlen_q, heads_q, head_dim)
        mK: cute.Tensor,  # (batch, seqlen_k, heads_k, head_dim)
        mV: cute.Tensor,  # (batch, seqlen_k, heads_k, head_dim_v)
        mdO: cute.Tensor,  # (batch, seqlen_q, heads_q, head_dim_v)
        mLSE: cute.Tensor,  # (batch, heads_q, padded rows) LSE log2(e)
        mDelta: cute.Tensor,  # (batch, heads_q, padded rows)
        mdQ: cute.Tensor,  # (batch, seqlen_q, heads_q, head_dim) fp32, zeroed
        mTurn: cute.Tensor,  # (batch, heads_q, padded blocks) int32, zeroed; deterministic only
        mdK: cute.Tensor,  # (batch, seqlen_k, heads_k, head_dim)
        mdV: cute.Tensor,  # (batch, seqlen_k, heads_k, head_dim_v)
        mTiles: Any,  # (tiles, fields) int32 of packed sequences, else None
        softmax_scale: Float32,
        softcap: Float32,
        window_left: Int32,
        window_right: Int32,
        max_ctas: Int32,  # of a kernel whose CTAs compute several tiles
        head_swizzle: Int32,  # heads whose tiles take turns
        stream: CUstream,
    ):
        config = self.config
        batch, seqlen_k, heads_k, _ = mK.shape
        tiles = Tiles(
            table=mTiles,
            blocks=cute.ceil_div(seqlen_k, config.tile_n),
            heads=heads_k,
            batch=batch,
            seqlens=Seqlens(q=mQ.shape[1], k=seqlen_k),
            head_swizzle=head_swizzle,
        )
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(
            KernelOperands(mQ, mK, mV, mdO, mLSE, mDelta, mdQ, mTurn, mdK, mdV),
            tiles,
            softmax.make_scales(softmax_scale, softcap, self.capped),
            (window_left, window_right),
        ).launch(
            grid=grid(tiles, config.scheduler, max_ctas),
            block=(config.threads, 1, 1),
            # Otherwise ptxas may spill to fit a second CTA.
            min_blocks_per_mp=1,
            use_pdl=self.dependent,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        tensors: KernelOperands,
        tiles: Tiles,
        scales: softmax.Scales,
        window: tuple[Int32, Int32],
    ):
        wait_for_previous(self.dependent)
        descending = turns.in_descending_order(self.signature.mask_kind, self.config.deterministic)
        swizzled = turns.heads_take_turns(self.signature.mask_kind, self.config.deterministic)
        walk = self.walk(tiles, descending=descending, swizzled=swizzled)
        context = TileContext(
            tensors=tensors,
            walk=walk,
            band=self.band(*window),
            scales=scales,
            smem=self.allocate_smem(),
        )
        for_each_tile(walk, self.compute_tile, context, None)

    @cute.jit
    def compute_tile(self, ctx: TileContext, assigned: AssignedTile, state: None):
        """One tile of keys: all query tiles that see it, then its rows of dK and dV."""
        config, dtype, tensors, smem = self.config, self.dtype, ctx.tensors, ctx.smem
        tidx, _, _ = cute.arch.thread_idx()
        # As an argument of the kernel it has made head dim 128 spill, packed and in order.
        group = tensors.mQ.shape[2] // tensors.mK.shape[2]
        mmas = TiledMmas(
            scores=tiled_mma(dtype, config.key_warps, config.key_shares, config.score_columns),
            keys=tiled_mma(dtype, config.key_warps, config.key_shares),
            queries=tiled_mma(dtype, config.query_warps, config.warps // config.query_warps),
        )
        acc_dK, acc_dV = mainloop(
            MainloopContext(
                config=config,
                band=ctx.band,
                capped=self.capped,
                mmas=mmas,
                copy_QK=cp_async.tiled_copy(dtype, config.threads, config.head_dim),
                copy_dOV=cp_async.tiled_copy(dtype, config.threads, config.head_dim_v),
                tensors=tensors,
                smem=smem,
                tile=key_tile(assigned, ctx.band, group, config, self.packed),
                tidx=tidx,
                scales=ctx.scales,
            )
        )
        # dK and dV leave through the memory of K and V, which nobody reads any more.
        cute.arch.sync_threads()
        if cutlass.const_expr(config.needs("dk")):
            acc_dK.store(acc_dK.load() * ctx.scales.softmax)
            copies.store_converted(mmas.keys, acc_dK, smem.sK[None, None, 0], tidx)
        if cutlass.const_expr(config.needs("dv")):
            copies.store_converted(mmas.keys, acc_dV, smem.sV[None, None, 0], tidx)
        cute.arch.sync_threads()
        # Read again: keeping its rows would take registers that the mainloop does not have.
        finished = tile_number(ctx.walk, assigned.number)
        if cutlass.const_expr(config.needs("dk")):
            self.store_tile(smem.sK, tensors.mdK, config.head_dim, finished)
        if cutlass.const_expr(config.needs("dv")):
            self.store_tile(smem.sV, tensors.mdV, config.head_dim_v, finished)
        if cutlass.const_expr(config.scheduler is Scheduler.PERSISTENT):
            # dK and dV have been read by all before the next K and V take their memory.
            cute.arch.sync_threads()

    @cute.jit
    def store_tile(
        self, sX: cute.Tensor, mX: cute.Tensor, head_dim: Constexpr[int], tile: AssignedTile
    ):
        """A finished gradient tile to all rows that the sequence owns."""
        tidx, _, _ = cute.arch.thread_idx()
        copy = cp_async.tiled_store(self.dtype, self.config.threads, head_dim)
        gX = sequence_rows(mX, tile.head, tile.sequence.batch, tile.sequence.k)
        cp_async.store_tile(copy, tidx, sX[None, None, 0], gX, tile.block)

    def allocate_smem(self) -> SmemTensors:
        """K and V (later dK and dV), the stages of Q, dO and their statistics, and a score tile."""
        config, allocator = self.config, SmemAllocator()
        m, n, d, dv = config.tile_m, config.tile_n, config.head_dim, config.head_dim_v

        def tile(shape: tuple[int, int], stages: int = 1) -> cute.Tensor:
            layout = smem_layout(shape, stages)
            return allocator.allocate_tensor(self.dtype, layout, byte_alignment=_ALIGNMENT)

        def statistic() -> cute.Tensor:
            layout = cute.make_layout((m, config.stages))
            return allocator.allocate_tensor(Float32, layout, byte_alignment=_ALIGNMENT)

        return SmemTensors(
            sK=tile((n, d)),
            sV=tile((n, dv)),
            sQ=tile((m, d), config.stages),
            sdO=tile((m, dv), config.stages),
            sSt=tile((n, m)),
            sLSE=statistic(),
            sDelta=statistic(),
        )
