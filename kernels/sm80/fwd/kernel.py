"""The Ampere forward kernel: a CTA computes tiles of query rows of one head, or of all heads that
share a key head, one or several.

All warps load, multiply and store. K and V blocks travel through a ring of `stages_kv` cp.async
stages; of block j the CTA waits for K, starts the loads of block j + stages_kv - 1 into the stage
that block j - 1 has left, multiplies Q K^T, and waits for V only behind the softmax.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32
from cutlass.memory import SmemAllocator

from hopperflash.plan.config import ForwardConfigSm80, Scheduler
from hopperflash.problem.mask import MaskKind

from ...common import operands, row_statistics, softmax
from ...common.attention_kernel import AttentionKernel
from ...common.band import Band, Seqlens
from ...common.dependent import wait_for_previous
from ...common.layouts import mn_view
from ...common.sequence import Rows, sequence_heads, sequence_rows, sequence_statistic
from ...common.tiles import QueryTile, query_tile
from ...common.work import AssignedTile, Tiles, Walk, for_each_tile, grid, tile_number
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


@dataclass(frozen=True)
class TileContext:
    """What a CTA needs for its tiles."""

    tensors: KernelOperands
    walk: Walk
    heads_per_key: Int32  # tiles' heads a key head
    band: Band
    scales: softmax.Scales
    smem: SmemTensors


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
        max_ctas: Int32,  # of a kernel whose CTAs compute several tiles
        head_swizzle: Int32,  # heads whose tiles take turns
        stream: CUstream,
    ):
        config = self.config
        batch, seqlen_q, heads_q, _ = mQ.shape
        seqlen_k, heads_k = mK.shape[1:3]
        tiles = Tiles(
            table=mTiles,
            blocks=cute.ceil_div(seqlen_q, config.queries),
            heads=heads_q // config.group,
            batch=batch,
            seqlens=Seqlens(q=seqlen_q, k=seqlen_k),
            head_swizzle=head_swizzle,
        )
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(
            KernelOperands(mQ, mK, mV, mO, mLSE),
            tiles,
            tiles.heads // heads_k,
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
        heads_per_key: Int32,
        scales: softmax.Scales,
        window: tuple[Int32, Int32],
    ):
        wait_for_previous(self.dependent)
        # Causal tiles near the end see the most keys: start them first.
        causal = self.signature.mask_kind is MaskKind.CAUSAL
        walk = self.walk(tiles, descending=causal, swizzled=causal)
        context = TileContext(
            tensors=tensors,
            walk=walk,
            heads_per_key=heads_per_key,
            band=self.band(*window, self.config.group),
            scales=scales,
            smem=self.allocate_smem(),
        )
        for_each_tile(walk, self.compute_tile, context, None)

    @cute.jit
    def compute_tile(self, ctx: TileContext, assigned: AssignedTile, state: None):
        """One tile of queries: all key blocks that it sees, then its rows of O and of the LSE."""
        config, dtype, tensors, smem = self.config, self.dtype, ctx.tensors, ctx.smem
        tidx, _, _ = cute.arch.thread_idx()
        tile = query_tile(assigned, ctx.band, ctx.heads_per_key, config)
        sequence, batch = tile.sequence, tile.sequence.batch
        seqlens = sequence.seqlens
        queries, keys = Rows(sequence.q.first, seqlens.q), Rows(sequence.k.first, seqlens.k)
        mma = tiled_mma(dtype, config.warps)
        acc_O, stats = mainloop(
            MainloopContext(
                config=config,
                band=ctx.band,
                capped=self.capped,
                mma=mma,
                copy_QK=cp_async.tiled_copy(dtype, config.threads, config.head_dim),
                copy_V=cp_async.tiled_copy(dtype, config.threads, config.head_dim_v),
                gQ=sequence_heads(tensors.mQ, tile.head, batch, queries, config.group),
                gK=sequence_rows(tensors.mK, tile.head_k, batch, keys),
                gV=sequence_rows(tensors.mV, tile.head_k, batch, keys),
                smem=smem,
                blocks=tile.keys,
                seqlens=seqlens,
                m_block=tile.m_block,
                tidx=tidx,
                scales=ctx.scales,
            )
        )
        # Read again, and the thread's number by other means: what was computed from them before
        # would be kept in registers that the mainloop does not have.
        assigned = tile_number(ctx.walk, assigned.number)
        tile = query_tile(assigned, ctx.band, ctx.heads_per_key, config)
        tidx = cute.arch.warp_idx() * cute.arch.WARP_SIZE + cute.arch.lane_idx()
        self.store_statistics(tensors.mLSE, tile, mma.get_slice(tidx), acc_O, stats)
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
            tile.m_block,
        )
        if cutlass.const_expr(config.scheduler is Scheduler.PERSISTENT):
            # O has been read by all before the next Q takes its memory.
            cute.arch.sync_threads()

    @cute.jit
    def store_statistics(
        self,
        mLSE: cute.Tensor,
        tile: QueryTile,
        thr_mma: cute.ThrMma,
        acc_O: cute.Tensor,
        stats: softmax.RowStats,
    ):
        """O = acc_O / row_sum, and the LSE of the rows that exist."""
        config, sequence = self.config, tile.sequence
        first_query = tile.m_block * config.queries
        cO = cute.make_identity_tensor((config.tile_m, config.head_dim_v))
        inverse_sum = cute.make_rmem_tensor_like(stats.row_sum)
        lse = cute.make_rmem_tensor_like(stats.row_sum)
        softmax.finish_rows(stats, inverse_sum, lse)
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
