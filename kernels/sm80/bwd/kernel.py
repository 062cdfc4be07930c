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
from cutlass.cute.runtime import make_fake_stream
from cutlass.memory import SmemAllocator

from hopperflash.plan.config import BackwardConfigSm80
from hopperflash.problem.mask import MaskKind
from hopperflash.problem.problem import Signature

from ...common import operands, turns
from ...common.block_range import Seqlens, query_block_range
from ...common.dtypes import NUMERIC
from ...common.key_tile import KeyTile
from ...common.softmax import LOG2_E
from .. import copies, cp_async
from ..mma import smem_layout, tiled_mma
from .mainloop import KernelOperands, MainloopContext, SmemTensors, TiledMmas, mainloop

_ALIGNMENT = 128


class BackwardSm80:
    """Gradients of exact attention for fp16 and bf16: full or causal, any lengths, GQA."""

    def __init__(self, config: BackwardConfigSm80, signature: Signature):
        self.config = config
        self.dtype = NUMERIC[signature.dtype]
        self.causal = signature.mask_kind is MaskKind.CAUSAL
        self.name = (
            f"hopperflash_bwd_sm80_{signature.dtype.value}_d{config.head_dim}x{config.head_dim_v}"
            f"_{config.tile_m}x{config.tile_n}_{signature.mask_kind.value}"
            f"{'_deterministic' if config.deterministic else ''}"
        )

    @staticmethod
    def fake_arguments(signature: Signature) -> tuple[Any, ...]:
        """Stand-ins for the arguments of `__call__`: any lengths, 16-byte aligned rows."""
        return (
            *operands.backward_operands(signature),
            make_fake_stream(use_tvm_ffi_env_stream=True),
        )

    @cute.jit
    def __call__(  # noqa: PLR0913, PLR0917 - one tensor each is what a launch takes
        self,
        mQ: cute.Tensor,  # (batch, seqlen_q, heads_q, head_dim)
        mK: cute.Tensor,  # (batch, seqlen_k, heads_k, head_dim)
        mV: cute.Tensor,  # (batch, seqlen_k, heads_k, head_dim_v)
        mdO: cute.Tensor,  # (batch, seqlen_q, heads_q, head_dim_v)
        mLSE: cute.Tensor,  # (batch, heads_q, padded seqlen_q) LSE log2(e)
        mDelta: cute.Tensor,  # (batch, heads_q, padded seqlen_q)
        mdQ: cute.Tensor,  # (batch, seqlen_q, heads_q, head_dim) fp32, zeroed
        mTurn: cute.Tensor,  # (batch, heads_q, query blocks) int32, zeroed; deterministic only
        mdK: cute.Tensor,  # (batch, seqlen_k, heads_k, head_dim)
        mdV: cute.Tensor,  # (batch, seqlen_k, heads_k, head_dim_v)
        softmax_scale: Float32,
        stream: CUstream,
    ):
        batch, seqlen_k, heads_k, _ = mK.shape
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(
            KernelOperands(mQ, mK, mV, mdO, mLSE, mDelta, mdQ, mTurn, mdK, mdV), softmax_scale
        ).launch(
            grid=(cute.ceil_div(seqlen_k, self.config.tile_n), heads_k, batch),
            block=(self.config.threads, 1, 1),
            # Otherwise ptxas may spill to fit a second CTA.
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, tensors: KernelOperands, softmax_scale: Float32):
        config, dtype = self.config, self.dtype
        tidx, _, _ = cute.arch.thread_idx()
        block, head_k, batch = cute.arch.block_idx()
        n_block = turns.launch_order(block, config.deterministic, self.causal)
        seqlens = Seqlens(q=tensors.mQ.shape[1], k=tensors.mK.shape[1])
        tile = KeyTile(
            n_block=n_block,
            head_k=head_k,
            batch=batch,
            group=tensors.mQ.shape[2] // tensors.mK.shape[2],
            queries=query_block_range(n_block, seqlens, config.tile_m, config.tile_n, self.causal),
            seqlens=seqlens,
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
                causal=self.causal,
                mmas=mmas,
                copy_QK=cp_async.tiled_copy(dtype, config.threads, config.head_dim),
                copy_dOV=cp_async.tiled_copy(dtype, config.threads, config.head_dim_v),
                tensors=tensors,
                smem=smem,
                tile=tile,
                tidx=tidx,
                scale_log2=softmax_scale * LOG2_E,
            )
        )
        # dK and dV leave through the memory of K and V, which nobody reads any more.
        cute.arch.sync_threads()
        if cutlass.const_expr(config.needs("dk")):
            acc_dK.store(acc_dK.load() * softmax_scale)
            copies.store_converted(mmas.keys, acc_dK, smem.sK[None, None, 0], tidx)
        if cutlass.const_expr(config.needs("dv")):
            copies.store_converted(mmas.keys, acc_dV, smem.sV[None, None, 0], tidx)
        cute.arch.sync_threads()
        if cutlass.const_expr(config.needs("dk")):
            mdK = tensors.mdK[batch, None, head_k, None]
            self.store_tile(smem.sK, mdK, config.head_dim, (tidx, n_block))
        if cutlass.const_expr(config.needs("dv")):
            mdV = tensors.mdV[batch, None, head_k, None]
            self.store_tile(smem.sV, mdV, config.head_dim_v, (tidx, n_block))

    @cute.jit
    def store_tile(
        self,
        sX: cute.Tensor,
        mX: cute.Tensor,
        head_dim: Constexpr[int],
        coordinates: tuple[Int32, Int32],
    ):
        """A finished gradient tile to global memory."""
        tidx, n_block = coordinates
        copy = cp_async.tiled_store(self.dtype, self.config.threads, head_dim)
        cp_async.store_tile(copy, tidx, sX[None, None, 0], mX, n_block)

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
