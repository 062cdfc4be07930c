"""Before the backward: delta, LSE in base 2, and a dQ accumulator of zeros.

    delta    = rowsum(dO o O) - dLSE      (dS = P o (dP - delta) then holds for both gradients)
    LSE_log2 = LSE log2(e), +inf where no key was seen, so that P = 2^(S - LSE_log2) is 0 there

Source: FlashAttention-2, arXiv 2307.08691, algorithm 2; the dLSE term follows from
d LSE / d S = P.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32
from cutlass.cute.runtime import make_fake_stream

from hopperflash.plan.config import PreprocessConfig
from hopperflash.problem.problem import Signature

from ..common import operands
from ..common.dtypes import NUMERIC
from ..common.softmax import LOG2_E

_LANES_PER_ROW = 8
_VECTOR = 8  # 16-bit elements in 16 bytes


class BackwardPreprocess:
    """One row of (batch, heads_q, padded seqlen_q) for every eight lanes."""

    def __init__(self, config: PreprocessConfig, signature: Signature):
        self.config = config
        self.dtype = NUMERIC[signature.dtype]
        self.name = f"hopperflash_bwd_preprocess_{signature.dtype.value}"

    @staticmethod
    def fake_arguments(signature: Signature) -> tuple[Any, ...]:
        """Stand-ins for the arguments of `__call__`."""
        dtype = NUMERIC[signature.dtype]
        batch, heads_q, seqlen_q = cute.sym_int(), cute.sym_int(), cute.sym_int()
        head_dim_v = cute.sym_int(divisibility=8)
        padded = cute.sym_int(divisibility=4)
        out_shape = (batch, seqlen_q, heads_q, head_dim_v)
        return (
            operands.vector_operand(dtype, out_shape),
            operands.vector_operand(dtype, out_shape),
            operands.row_statistic((batch, heads_q, seqlen_q)),
            operands.row_statistic((batch, heads_q, seqlen_q)),
            operands.vector_operand(Float32, (batch, heads_q, padded)),
            operands.vector_operand(Float32, (batch, heads_q, padded)),
            operands.vector_operand(Float32, operands.any_shape(4)),
            make_fake_stream(use_tvm_ffi_env_stream=True),
        )

    @cute.jit
    def __call__(
        self,
        mO: cute.Tensor,  # (batch, seqlen_q, heads_q, head_dim_v)
        mdO: cute.Tensor,  # (batch, seqlen_q, heads_q, head_dim_v)
        mLSE: cute.Tensor,  # (batch, heads_q, seqlen_q) fp32
        mdLSE: cute.Tensor,  # (batch, heads_q, seqlen_q) fp32
        mLSE_log2: cute.Tensor,  # (batch, heads_q, padded seqlen_q) out
        mDelta: cute.Tensor,  # (batch, heads_q, padded seqlen_q) out
        mdQ: cute.Tensor,  # (batch, seqlen_q, heads_q, head_dim) fp32 out: zeros
        stream: CUstream,
    ):
        batch, heads_q, padded = mDelta.shape
        rows = self.config.threads // _LANES_PER_ROW
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(mO, mdO, mLSE, mdLSE, mLSE_log2, mDelta, mdQ).launch(
            grid=(cute.ceil_div(padded, rows), heads_q, batch),
            block=(self.config.threads, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        mO: cute.Tensor,
        mdO: cute.Tensor,
        mLSE: cute.Tensor,
        mdLSE: cute.Tensor,
        mLSE_log2: cute.Tensor,
        mDelta: cute.Tensor,
        mdQ: cute.Tensor,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        block, head, batch = cute.arch.block_idx()
        lane = tidx % _LANES_PER_ROW
        row = block * (self.config.threads // _LANES_PER_ROW) + tidx // _LANES_PER_ROW
        exists = row < mO.shape[1]
        product = Float32(0.0)
        if exists:
            product = row_product(mO[batch, row, head, None], mdO[batch, row, head, None], lane)
            if cutlass.const_expr(self.config.zero_dq):
                zero_row(mdQ[batch, row, head, None], lane)
        product = cute.arch.warp_reduction_sum(product, threads_in_group=_LANES_PER_ROW)
        if lane == 0:
            # Rows past the end are read by the last tile and must weigh nothing.
            lse_log2, delta = Float32.inf, Float32(0.0)
            if exists:
                lse = mLSE[batch, head, row]
                if lse != -Float32.inf:
                    lse_log2 = lse * LOG2_E
                    delta = product - mdLSE[batch, head, row]
            if row < mDelta.shape[2]:
                mLSE_log2[batch, head, row] = lse_log2
                mDelta[batch, head, row] = delta


@cute.jit
def row_product(rowA: cute.Tensor, rowB: cute.Tensor, lane: Int32):
    """This lane's share of the dot product of two rows, in fp32."""
    A = cute.logical_divide(rowA, cute.make_layout(_VECTOR))  # (vector, vectors)
    B = cute.logical_divide(rowB, cute.make_layout(_VECTOR))
    total = Float32(0.0)
    for v in cutlass.range(lane, cute.size(A, mode=[1]), _LANES_PER_ROW):
        a = cute.make_rmem_tensor(_VECTOR, rowA.element_type)
        b = cute.make_rmem_tensor_like(a)
        cute.autovec_copy(A[None, v], a)
        cute.autovec_copy(B[None, v], b)
        products = a.load().to(Float32) * b.load().to(Float32)
        total = products.reduce(cute.ReductionOp.ADD, total, 0)
    return total


@cute.jit
def zero_row(row: cute.Tensor, lane: Int32):
    """Zeros into this lane's share of an fp32 row."""
    vectors = cute.logical_divide(row, cute.make_layout(_VECTOR))
    zeros = cute.make_rmem_tensor(_VECTOR, Float32)
    zeros.fill(0.0)
    for v in cutlass.range(lane, cute.size(vectors, mode=[1]), _LANES_PER_ROW):
        cute.autovec_copy(zeros, vectors[None, v])
