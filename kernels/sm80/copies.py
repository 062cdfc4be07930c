"""Accumulators to shared memory without stmatrix, which Ampere lacks."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32


@cute.jit
def store_converted(mma: cute.TiledMma, acc: cute.Tensor, sX: cute.Tensor, tidx: Int32):
    """Store an fp32 accumulator tile as 16-bit pairs of neighbouring columns."""
    rX = cute.make_rmem_tensor_like(acc, sX.element_type)
    rX.store(acc.load().to(sX.element_type))
    atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), sX.element_type, num_bits_per_copy=32)
    thread_copy = cute.make_tiled_copy_C(atom, mma).get_slice(tidx)
    cute.copy(atom, thread_copy.retile(rX), thread_copy.partition_D(sX))
