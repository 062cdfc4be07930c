"""The Ampere backward kernel: one CTA owns a tile of keys and values of one key head.

It streams the query tiles that see its keys, of every query head of the group, so that dK and dV
are summed in registers and written once; dQ is added up in fp32 in global memory. Q, dO and their
row statistics travel through a ring of cp.async stages; all warps load, multiply and store.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Constexpr, Float32, Int32
from cutlass.memory import SmemAllocator

from hopperflash.plan.config import BackwardConfigSm80

from ...common import operands, softmax, turns
from ...common.attention_kernel import AttentionKernel
from ...common.band import Band, Seqlens
from ...common.block_range import query_block_range
from ...common.dependent import wait_for_previous
from ...common.key_tile import KeyTile
from ...common.sequence import AssignedTile, assigned_tile, first_padded_block, sequence_rows
from .. import copies, cp_async
from ..mma import smem_layout, tiled_mma
from .mainloop import KernelOperands, MainloopContext, SmemTensors, TiledMmas, mainloop

_ALIGNMENT = 128


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
        stream: CUstream,
    ):
        batch, seqlen_k, heads_k, _ = mK.shape
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(
            KernelOperands(mQ, mK, mV, mdO, mLSE, mDelta, mdQ, mTurn, mdK, mdV),
            mTiles,
            softmax.make_scales(softmax_scale, softcap, self.capped),
            (window_left, window_right),
        ).launch(
            grid=self.grid(mTiles, cute.ceil_div(seqlen_k, self.config.tile_n), heads_k, batch),
            block=(self.config.threads, 1, 1),
            # Otherwise ptxas may spill to fit a second CTA.
            min_blocks_per_mp=1,
            use_pdl=self.dependent,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        tensors: KernelOperands,
        mTiles: Any,
        scales: softmax.Scales,
        window: tuple[Int32, Int32],
    ):
        wait_for_previous(self.dependent)
        tile = self.assigned_tile(tensors, mTiles)
        band = self.band(*window)
        if cutlass.const_expr(self.packed):
            if tile.block >= 0:
                self.compute_tile(tensors, mTiles, tile, band, scales)
        else:
            self.compute_tile(tensors, mTiles, tile, band, scales)

    @cute.jit
    def assigned_tile(self, tensors: KernelOperands, mTiles: Any):
        """The key tile of this CTA."""
        _, seqlen_k, heads_k, _ = tensors.mK.shape
        seqlens = Seqlens(q=tensors.mQ.shape[1], k=seqlen_k)
        descending = turns.in_descending_order(self.signature.mask_kind, self.config.deterministic)
        return assigned_tile(mTiles, heads_k, seqlens, descending=descending)

    @cute.jit
    def compute_tile(
        self,
        tensors: KernelOperands,
        mTiles: Any,
        assigned: AssignedTile,
        band: Band,
        scales: softmax.Scales,
    ):
        """One tile of keys: all query tiles that see it, then its rows of dK and dV."""
        config, dtype, sequence = self.config, self.dtype, assigned.sequence
        tidx, _, _ = cute.arch.thread_idx()
        tile = KeyTile(
            n_block=assigned.block,
            head_k=assigned.head,
            group=tensors.mQ.shape[2] // tensors.mK.shape[2],
            queries=query_block_range(
                assigned.block, sequence.seqlens, band, config.tile_m, config.tile_n
            ),
            sequence=sequence,
            first_padded_block=first_padded_block(sequence, self.packed, config.tile_m),
        )
        smem = self.allocate_smem()
        mmas = TiledMmas(
            scores=tiled_mma(dtype, config.key_warps, config.key_shares, config.score_columns),
            keys=tiled_mma(dtype, config.key_warps, config.key_shares),
            queries=tiled_mma(dtype, config.query_warps, config.warps // config.query_warps),
        )
        acc_dK, acc_dV = mainloop(
            MainloopContext(
                config=config,
                band=band,
                capped=self.capped,
                mmas=mmas,
                copy_QK=cp_async.tiled_copy(dtype, config.threads, config.head_dim),
                copy_dOV=cp_async.tiled_copy(dtype, config.threads, config.head_dim_v),
                tensors=tensors,
                smem=smem,
                tile=tile,
                tidx=tidx,
                scales=scales,
            )
        )
        # dK and dV leave through the memory of K and V, which nobody reads any more.
        cute.arch.sync_threads()
        if cutlass.const_expr(config.needs("dk")):
            acc_dK.store(acc_dK.load() * scales.softmax)
            copies.store_converted(mmas.keys, acc_dK, smem.sK[None, None, 0], tidx)
        if cutlass.const_expr(config.needs("dv")):
            copies.store_converted(mmas.keys, acc_dV, smem.sV[None, None, 0], tidx)
        cute.arch.sync_threads()
        # Read again: keeping its rows would take registers that the mainloop does not have.
        finished = self.assigned_tile(tensors, mTiles)
        if cutlass.const_expr(config.needs("dk")):
            self.store_tile(smem.sK, tensors.mdK, config.head_dim, finished)
        if cutlass.const_expr(config.needs("dv")):
            self.store_tile(smem.sV, tensors.mdV, config.head_dim_v, finished)

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
