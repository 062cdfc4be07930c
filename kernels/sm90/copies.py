"""Register-to-shared copies by stmatrix."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Constexpr, Int32
from cutlass.cute.nvgpu import warp


@cute.jit
def store_accumulator(
    mma: cute.TiledMma,
    fragment: cute.Tensor,  # 16-bit, in the order of an accumulator of `mma`
    sX: cute.Tensor,  # (tile_m, columns)
    tidx: Int32,
    column_major: Constexpr[bool] = False,
):
    """Store a 16-bit accumulator tile to shared memory, four 8x8 matrices an instruction."""
    atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(column_major, 4), sX.element_type)
    thread_copy = cute.make_tiled_copy_C(atom, mma).get_slice(tidx)
    cute.copy(atom, thread_copy.retile(fragment), thread_copy.partition_D(sX))


@cute.jit
def store_converted(
    mma: cute.TiledMma,
    acc: cute.Tensor,
    sX: cute.Tensor,
    tidx: Int32,
    column_major: Constexpr[bool] = False,
):
    """Store an fp32 accumulator tile to 16-bit shared memory."""
    rX = cute.make_rmem_tensor_like(acc, sX.element_type)
    rX.store(acc.load().to(sX.element_type))
    store_accumulator(mma, rX, sX, tidx, column_major)
