"""After the backward: dQ = softmax_scale times its fp32 accumulator, in the input dtype."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32
from cutlass.cute.runtime import make_fake_stream

from hopperflash.plan.config import PostprocessConfig
from hopperflash.problem.problem import Signature

from ..common import operands
from ..common.dependent import wait_for_previous
from ..common.dtypes import NUMERIC

_LANES_PER_ROW = 8
_VECTOR = 8


class BackwardPostprocess:
    """One row of (batch, seqlen, heads) for every eight lanes."""

    def __init__(self, config: PostprocessConfig, signature: Signature, dependent: bool = False):
        self.config = config
        self.dependent = dependent
        self.dtype = NUMERIC[signature.dtype]
        self.name = f"hopperflash_bwd_postprocess_{signature.dtype.value}"

    def fake_arguments(self) -> tuple[Any, ...]:
        """Stand-ins for the arguments of `__call__`."""
        shape = (*(cute.sym_int() for _ in range(3)), cute.sym_int(divisibility=8))
        return (
            operands.vector_operand(Float32, shape),
            operands.vector_operand(self.dtype, shape),
            Float32(1.0),
            make_fake_stream(use_tvm_ffi_env_stream=True),
        )

    @cute.jit
    def __call__(
        self,
        mAcc: cute.Tensor,  # (batch, seqlen, heads, head_dim) fp32
        mX: cute.Tensor,  # (batch, seqlen, heads, head_dim) out
        scale: Float32,
        stream: CUstream,
    ):
        batch, seqlen, heads, _ = mX.shape
        rows = self.config.threads // _LANES_PER_ROW
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(mAcc, mX, scale).launch(
            grid=(cute.ceil_div(seqlen, rows), heads, batch),
            block=(self.config.threads, 1, 1),
            use_pdl=self.dependent,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, mAcc: cute.Tensor, mX: cute.Tensor, scale: Float32):
        wait_for_previous(self.dependent)
        tidx, _, _ = cute.arch.thread_idx()
        block, head, batch = cute.arch.block_idx()
        lane = tidx % _LANES_PER_ROW
        row = block * (self.config.threads // _LANES_PER_ROW) + tidx // _LANES_PER_ROW
        if row < mX.shape[1]:
            acc = cute.logical_divide(mAcc[batch, row, head, None], cute.make_layout(_VECTOR))
            out = cute.logical_divide(mX[batch, row, head, None], cute.make_layout(_VECTOR))
            for v in cutlass.range(lane, cute.size(acc, mode=[1]), _LANES_PER_ROW):
                a = cute.make_rmem_tensor(_VECTOR, Float32)
                x = cute.make_rmem_tensor(_VECTOR, self.dtype)
                cute.autovec_copy(acc[None, v], a)
                x.store((a.load() * scale).to(self.dtype))
                cute.autovec_copy(x, out[None, v])
