"""The Ampere forward kernel: one CTA computes one tile of query rows of one head, or of all heads
that share a key head.

All warps load, multiply and store. K and V blocks travel through a ring of `stages_kv` cp.async
stages; of block j the CTA waits for K, starts the loads of block j + stages_kv - 1 into the stage
that block j - 1 has left, multiplies Q K^T, and waits for V only behind the softmax.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32
from cutlass.memory import SmemAllocator

from hopperflash.plan.config import ForwardConfigSm80
from hopperflash.problem.mask import MaskKind

from ...common import operands, row_statistics, softmax
from ...common.attention_kernel import AttentionKernel
from ...common.band import Band, Seqlens
from ...common.block_range import key_block_range
from ...common.dependent import wait_for_previous
from ...common.layouts import mn_view
from ...common.sequence import (
    AssignedTile,
    Rows,
    assigned_tile,
    sequence_heads,
    sequence_rows,
    sequence_statistic,
)
from .. import copies, cp_async
from ..mma import smem_layout, tiled_mma
from .mainloop import MainloopContext, SmemTensors, mainloop

_ALIGNMENT = 128


class KernelOperands(NamedTuple):
    """The tensors as the kernel sees them: (batch, seqlen, heads, head_dim)."""

    mQ: cute.Tensor
    mK: cute.Tensor
    mV: cute.Tensor
    mO: cute.Tensor
    mLSE: cute.Tensor  # (batch, heads_q, seqlen_q) fp32


class ForwardSm80(AttentionKernel[ForwardConfigSm80]):
    """Exact attention forward for fp16 and bf16: dense or packed, with any grouping."""

    kind = "fwd_sm80"
    fake_operands = staticmethod(operands.forward_operands)

    @cute.jit
    def __call__(  # noqa: PLR0913, PLR0917 - one tensor each is what a launch takes
        self,
        mQ: cute.Tensor,  # (batch, seqlen_q, heads_q, head_dim)
        mK: cute.Tensor,  # (batch, seqlen_k, heads_k, head_dim)
        mV: cute.Tensor,  # (batch, seqlen_k, heads_k, head_dim_v)
        mO: cute.Tensor,  # (batch, seqlen_q, heads_q, head_dim_v)
        mLSE: cute.Tensor,  # (batch, heads_q, seqlen_q)
        mTiles: Any,  # (tiles, fields) int32 of packed sequences, else None
        softmax_scale: Float32,
        softcap: Float32,
        window_left: Int32,
        window_right: Int32,
        stream: CUstream,
    ):
        batch, seqlen_q, heads_q, _ = mQ.shape
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(
            KernelOperands(mQ, mK, mV, mO, mLSE),
            mTiles,
            softmax.make_scales(softmax_scale, softcap, self.capped),
            (window_left, window_right),
        ).launch(
            grid=self.grid(
                mTiles,
                cute.ceil_div(seqlen_q, self.config.queries),
                heads_q // self.config.group,
                batch,
            ),
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
        band = self.band(*window, self.config.group)
        if cutlass.const_expr(self.packed):
            if tile.block >= 0:
                self.compute_tile(tensors, mTiles, tile, band, scales)
        else:
            self.compute_tile(tensors, mTiles, tile, band, scales)

    @cute.jit
    def assigned_tile(self, tensors: KernelOperands, mTiles: Any):
        """The query tile of this CTA."""
        _, seqlen_q, heads_q, _ = tensors.mQ.shape
        seqlens = Seqlens(q=seqlen_q, k=tensors.mK.shape[1])
        # Causal tiles near the end see the most keys: start them first.
        descending = self.signature.mask_kind is MaskKind.CAUSAL
        return assigned_tile(mTiles, heads_q // self.config.group, seqlens, descending=descending)

    @cute.jit
    def compute_tile(
        self,
        tensors: KernelOperands,
        mTiles: Any,
        tile: AssignedTile,
        band: Band,
        scales: softmax.Scales,
    ):
        """One tile of queries: all key blocks that it sees, then its rows of O and of the LSE."""
        config, dtype = self.config, self.dtype
        tidx, _, _ = cute.arch.thread_idx()
        tile_heads = tensors.mQ.shape[2] // config.group
        head_k = tile.head // (tile_heads // tensors.mK.shape[2])
        sequence, batch = tile.sequence, tile.sequence.batch
        seqlens = sequence.seqlens
        queries, keys = Rows(sequence.q.first, seqlens.q), Rows(sequence.k.first, seqlens.k)
        smem = self.allocate_smem()
        mma = tiled_mma(dtype, config.warps)
        acc_O, stats = mainloop(
            MainloopContext(
                config=config,
                band=band,
                capped=self.capped,
                mma=mma,
                copy_QK=cp_async.tiled_copy(dtype, config.threads, config.head_dim),
                copy_V=cp_async.tiled_copy(dtype, config.threads, config.head_dim_v),
                gQ=sequence_heads(tensors.mQ, tile.head, batch, queries, config.group),
                gK=sequence_rows(tensors.mK, head_k, batch, keys),
                gV=sequence_rows(tensors.mV, head_k, batch, keys),
                smem=smem,
                blocks=key_block_range(tile.block, seqlens, band, config.queries, config.tile_n),
                seqlens=seqlens,
                m_block=tile.block,
                tidx=tidx,
                scales=scales,
            )
        )
        # Read again, and the thread's number by other means: what was computed from them before
        # would be kept in registers that the mainloop does not have.
        tile = self.assigned_tile(tensors, mTiles)
        tidx = cute.arch.warp_idx() * cute.arch.WARP_SIZE + cute.arch.lane_idx()
        self.store_statistics(tensors.mLSE, tile, mma.get_slice(tidx), scales, (acc_O, stats))
        # O leaves through the shared memory of Q, which nobody reads any more.
        cute.arch.sync_threads()
        sO = cute.make_tensor(smem.sQ.iterator, smem_layout((config.tile_m, config.head_dim_v)))[
            None, None, 0
        ]
        copies.store_converted(mma, acc_O, sO, tidx)
        cute.arch.sync_threads()
        cp_async.store_heads(
            cp_async.tiled_store(dtype, config.threads, config.head_dim_v),
            tidx,
            sO,
            sequence_heads(
                tensors.mO, tile.head, tile.sequence.batch, tile.sequence.q, config.group
            ),
            tile.block,
        )

    @cute.jit
    def store_statistics(
        self,
        mLSE: cute.Tensor,
        tile: AssignedTile,
        thr_mma: cute.ThrMma,
        scales: softmax.Scales,
        results: tuple[cute.Tensor, softmax.RowStats],  # acc_O and the statistics of its rows
    ):
        """O = acc_O / row_sum, and the LSE of the rows that exist."""
        config, sequence = self.config, tile.sequence
        acc_O, stats = results
        first_query = tile.block * config.queries
        cO = cute.make_identity_tensor((config.tile_m, config.head_dim_v))
        inverse_sum = cute.make_rmem_tensor_like(stats.row_sum)
        lse = cute.make_rmem_tensor_like(stats.row_sum)
        softmax.finish_rows(stats, inverse_sum, lse, scales.natural)
        if cutlass.const_expr(self.packed):
            row_statistics.empty_rows(
                (inverse_sum, lse), cO, thr_mma, sequence.seqlens.q - first_query, config.group
            )
        softmax.rescale_rows(mn_view(acc_O), inverse_sum)
        gLSE = sequence_statistic(mLSE, tile.head, sequence.batch, sequence.q, config.group)
        row_statistics.store_rows(lse, gLSE, cO, thr_mma, first_query)

    def allocate_smem(self) -> SmemTensors:
        """Q (later O), and the stages of K and V."""
        config, dtype = self.config, self.dtype
        allocator = SmemAllocator()
        wider = max(config.head_dim, config.head_dim_v)
        QO = allocator.allocate_array(dtype, config.tile_m * wider, byte_alignment=_ALIGNMENT)
        K = smem_layout((config.tile_n, config.head_dim), config.stages_kv)
        V = smem_layout((config.tile_n, config.head_dim_v), config.stages_kv)
        return SmemTensors(
            sQ=cute.make_tensor(QO, smem_layout((config.tile_m, config.head_dim))),
            sK=allocator.allocate_tensor(dtype, K, byte_alignment=_ALIGNMENT),
            sV=allocator.allocate_tensor(dtype, V, byte_alignment=_ALIGNMENT),
        )
