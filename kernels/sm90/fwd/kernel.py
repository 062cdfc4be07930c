"""The Hopper forward kernel: one CTA computes one tile of query rows of one head.

Roles, in warpgroups of 128 threads:
    warpgroup 0        producer: its first warp streams Q, K and V by TMA (`load`)
    warpgroups 1..n    consumers: 64 query rows each, both GEMMs and the softmax (`mma`), then the
                       output (`epilogue`)

Pipelines (full and empty mbarriers a stage), producer -> consumers:
    Q  1 stage          filled once a tile, never released: the epilogue reuses its memory for O
    K  stages_kv        released when S = Q K^T is complete
    V  stages_kv        released when O += P V is complete

Timeline of a CTA with two stages, key blocks j = n-1 .. 0:
    load    Q K(n-1) V(n-1) K(n-2) V(n-2) | K(n-3) waits for S(n-1) | V(n-3) for PV(n-1) | ...
    mma     S(n-1), softmax | S(j) and PV(j+1) in flight, mask on the boundary, softmax(j) | PV(0)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, pipeline
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.runtime import make_fake_stream
from cutlass.memory import SmemAllocator

from hopperflash.plan.config import ForwardConfig, POperand
from hopperflash.problem.mask import MaskKind
from hopperflash.problem.problem import Signature

from ...common import operands
from ...common.block_range import Seqlens, key_block_range
from ...common.dtypes import NUMERIC
from ...common.softmax import LOG2_E
from .. import tma, wgmma
from .epilogue import EpilogueContext, epilogue
from .load import LoadContext, load
from .mma import MmaContext, mma
from .storage import (
    make_pipelines,
    rows_of_O_are_rows_of_Q,
    smem_layouts,
    smem_tensors,
    storage_struct,
)


class KernelOperands(NamedTuple):
    """The tensors as the kernel sees them."""

    tma_Q: tma.TmaTensor
    tma_K: tma.TmaTensor
    tma_Vt: tma.TmaTensor
    tma_O: tma.TmaTensor
    mLSE: cute.Tensor  # (batch, heads_q, seqlen_q) fp32


class Scales(NamedTuple):
    """The softmax scale, natural and for base-2 exponentials."""

    softmax: Float32
    log2: Float32


class ForwardSm90:
    """Exact attention forward for fp16 and bf16: full or causal, any lengths, GQA by head index."""

    def __init__(self, config: ForwardConfig, signature: Signature):
        self.config = config
        self.dtype = NUMERIC[signature.dtype]
        self.causal = signature.mask_kind is MaskKind.CAUSAL
        self.name = (
            f"hopperflash_fwd_sm90_{signature.dtype.value}_d{config.head_dim}x{config.head_dim_v}"
            f"_{config.tile_m}x{config.tile_n}_{signature.mask_kind.value}"
        )

    @staticmethod
    def fake_arguments(signature: Signature) -> tuple[Any, ...]:
        """Stand-ins for the arguments of `__call__`: any lengths, any strides that TMA can read."""
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
        config, dtype = self.config, self.dtype
        layouts = smem_layouts(config, dtype)
        p_source = (
            warpgroup.OperandSource.RMEM
            if config.p_operand is POperand.REGISTERS
            else warpgroup.OperandSource.SMEM
        )
        mma_S = wgmma.tiled_mma(
            dtype,
            (config.tile_m, config.tile_n),
            warpgroup.OperandSource.SMEM,
            OperandMajorMode.K,
        )
        mma_O = wgmma.tiled_mma(
            dtype, (config.tile_m, config.head_dim_v), p_source, OperandMajorMode.MN
        )
        rows_of_warpgroup = (wgmma.ROWS_PER_WARPGROUP, config.head_dim_v)
        kernel_operands = KernelOperands(
            tma_Q=tma.load_atom(
                tma.sequence_major(mQ), layouts.Q, (config.tile_m, config.head_dim)
            ),
            tma_K=tma.load_atom(
                tma.sequence_major(mK), layouts.K, (config.tile_n, config.head_dim)
            ),
            tma_Vt=tma.load_atom(
                tma.feature_major(mV), layouts.Vt, (config.head_dim_v, config.tile_n)
            ),
            tma_O=tma.store_atom(
                tma.sequence_major(mO),
                wgmma.row_slice(layouts.O, rows_of_warpgroup),
                rows_of_warpgroup,
            ),
            mLSE=mLSE,
        )
        batch, seqlen_q, heads_q, _ = mQ.shape
        seqlens = Seqlens(q=seqlen_q, k=mK.shape[1])
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(
            kernel_operands,
            seqlens,
            heads_q // mK.shape[2],
            Scales(softmax_scale, softmax_scale * LOG2_E),
            mma_S,
            mma_O,
        ).launch(
            grid=(cute.ceil_div(seqlen_q, config.tile_m), heads_q, batch),
            block=(config.threads, 1, 1),
            # Tells ptxas the registers at entry, without which it may drop setmaxnreg.
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        tensors: KernelOperands,
        seqlens: Seqlens,
        group: Int32,  # query heads a key head
        scales: Scales,
        mma_S: cute.TiledMma,
        mma_O: cute.TiledMma,
    ):
        config, dtype = self.config, self.dtype
        tidx, _, _ = cute.arch.thread_idx()
        block, head, batch = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        # Causal tiles near the end see the most keys: start them first.
        m_block = blocks - 1 - block if cutlass.const_expr(self.causal) else block
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_idx == 0:
            for tma_X in tensors[:4]:
                cpasync.prefetch_descriptor(tma_X.atom)

        layouts = smem_layouts(config, dtype)
        storage = SmemAllocator().allocate(storage_struct(config, layouts, dtype))
        smem = smem_tensors(storage, layouts)
        pipelines = make_pipelines(storage, config, layouts, dtype)
        pipeline.pipeline_init_arrive(cluster_shape_mn=(1, 1), is_relaxed=True)
        pipeline.pipeline_init_wait(cluster_shape_mn=(1, 1))

        key_blocks = key_block_range(m_block, seqlens, config.tile_m, config.tile_n, self.causal)
        if warp_idx < wgmma.THREADS_PER_WARPGROUP // cute.arch.WARP_SIZE:
            cute.arch.setmaxregister_decrease(config.registers_producer)
            if warp_idx == 0:
                load(
                    LoadContext(
                        config=config,
                        tma_Q=tensors.tma_Q,
                        tma_K=tensors.tma_K,
                        tma_Vt=tensors.tma_Vt,
                        smem=smem,
                        pipelines=pipelines,
                        m_block=m_block,
                        head=head,
                        head_k=head // group,
                        batch=batch,
                        key_blocks=key_blocks.visited,
                    )
                )
        else:
            cute.arch.setmaxregister_increase(config.registers_consumer)
            consumer_tidx = tidx - wgmma.THREADS_PER_WARPGROUP
            acc_O, stats = mma(
                MmaContext(
                    config=config,
                    causal=self.causal,
                    mma_S=mma_S,
                    mma_O=mma_O,
                    smem=smem,
                    pipelines=pipelines,
                    blocks=key_blocks,
                    seqlens=seqlens,
                    m_block=m_block,
                    consumer_tidx=consumer_tidx,
                    scale_log2=scales.log2,
                )
            )
            epilogue(
                EpilogueContext(
                    config=config,
                    own_rows=rows_of_O_are_rows_of_Q(config, dtype),
                    mma_O=mma_O,
                    smem=smem,
                    tma_O=tensors.tma_O,
                    mLSE=tensors.mLSE,
                    m_block=m_block,
                    head=head,
                    batch=batch,
                    consumer_tidx=consumer_tidx,
                    softmax_scale=scales.softmax,
                ),
                acc_O,
                stats,
            )
