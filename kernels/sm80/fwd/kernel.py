"""The Ampere forward kernel: one CTA computes one tile of query rows of one head.

All warps load, multiply and store. K and V blocks travel through a ring of `stages_kv` cp.async
stages; of block j the CTA waits for K, starts the loads of block j + stages_kv - 1 into the stage
that block j - 1 has left, multiplies Q K^T, and waits for V only behind the softmax.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32
from cutlass.cute.runtime import make_fake_stream
from cutlass.memory import SmemAllocator

from hopperflash.plan.config import ForwardConfigSm80
from hopperflash.problem.mask import MaskKind
from hopperflash.problem.problem import Signature

from ...common import operands, row_statistics, softmax
from ...common.block_range import Seqlens, key_block_range
from ...common.dtypes import NUMERIC
from ...common.layouts import mn_view
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


class ForwardSm80:
    """Exact attention forward for fp16 and bf16: full or causal, any lengths, GQA by head index."""

    def __init__(self, config: ForwardConfigSm80, signature: Signature):
        self.config = config
        self.dtype = NUMERIC[signature.dtype]
        self.causal = signature.mask_kind is MaskKind.CAUSAL
        self.name = (
            f"hopperflash_fwd_sm80_{signature.dtype.value}_d{config.head_dim}x{config.head_dim_v}"
            f"_{config.tile_m}x{config.tile_n}_{signature.mask_kind.value}"
        )

    @staticmethod
    def fake_arguments(signature: Signature) -> tuple[Any, ...]:
        """Stand-ins for the arguments of `__call__`: any lengths, 16-byte aligned rows."""
        return (
            *operands.forward_operands(signature),
            make_fake_stream(use_tvm_ffi_env_stream=True),
        )

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # (batch, seqlen_q, heads_q, head_dim)
        mK: cute.Tensor,  # (batch, seqlen_k, heads_k, head_dim)
        mV: cute.Tensor,  # (batch, seqlen_k, heads_k, head_dim_v)
        mO: cute.Tensor,  # (batch, seqlen_q, heads_q, head_dim_v)
        mLSE: cute.Tensor,  # (batch, heads_q, seqlen_q)
        softmax_scale: Float32,
        stream: CUstream,
    ):
        batch, seqlen_q, heads_q, _ = mQ.shape
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(KernelOperands(mQ, mK, mV, mO, mLSE), softmax_scale).launch(
            grid=(cute.ceil_div(seqlen_q, self.config.tile_m), heads_q, batch),
            block=(self.config.threads, 1, 1),
            # Otherwise ptxas may spill to fit a second CTA.
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, tensors: KernelOperands, softmax_scale: Float32):
        config, dtype = self.config, self.dtype
        tidx, _, _ = cute.arch.thread_idx()
        block, head, batch = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        # Causal tiles near the end see the most keys: start them first.
        m_block = blocks - 1 - block if cutlass.const_expr(self.causal) else block
        head_k = head // (tensors.mQ.shape[2] // tensors.mK.shape[2])
        seqlens = Seqlens(q=tensors.mQ.shape[1], k=tensors.mK.shape[1])

        smem = self.allocate_smem()
        mma = tiled_mma(dtype, config.warps)
        acc_O, stats = mainloop(
            MainloopContext(
                config=config,
                causal=self.causal,
                mma=mma,
                copy_QK=cp_async.tiled_copy(dtype, config.threads, config.head_dim),
                copy_V=cp_async.tiled_copy(dtype, config.threads, config.head_dim_v),
                mQ=tensors.mQ[batch, None, head, None],
                mK=tensors.mK[batch, None, head_k, None],
                mV=tensors.mV[batch, None, head_k, None],
                smem=smem,
                blocks=key_block_range(m_block, seqlens, config.tile_m, config.tile_n, self.causal),
                seqlens=seqlens,
                m_block=m_block,
                tidx=tidx,
                scale_log2=softmax_scale * softmax.LOG2_E,
            )
        )

        inverse_sum = cute.make_rmem_tensor_like(stats.row_sum)
        lse = cute.make_rmem_tensor_like(stats.row_sum)
        softmax.finish_rows(stats, inverse_sum, lse, softmax_scale)
        softmax.rescale_rows(mn_view(acc_O), inverse_sum)
        row_statistics.store_rows(
            lse,
            tensors.mLSE[batch, head, None],
            cute.make_identity_tensor((config.tile_m, config.head_dim_v)),
            mma.get_slice(tidx),
            m_block * config.tile_m,
        )
        # O leaves through the shared memory of Q, which nobody reads any more.
        cute.arch.sync_threads()
        sO = cute.make_tensor(smem.sQ.iterator, smem_layout((config.tile_m, config.head_dim_v)))[
            None, None, 0
        ]
        copies.store_converted(mma, acc_O, sO, tidx)
        cute.arch.sync_threads()
        cp_async.store_tile(
            cp_async.tiled_store(dtype, config.threads, config.head_dim_v),
            tidx,
            sO,
            tensors.mO[batch, None, head, None],
            m_block,
        )

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
