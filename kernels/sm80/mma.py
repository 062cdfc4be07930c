"""mma.sync m16n8k16: swizzled shared layouts, tiled MMAs, operands through ldmatrix, the GEMM."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32
from cutlass.cute.nvgpu import warp

_MMA = (16, 8, 16)
# Swizzle (bits, base, shift) in elements, by the contiguous extent of an atom of 8 rows.
_SWIZZLES = ((64, (3, 3, 3)), (32, (2, 3, 3)), (16, (1, 3, 3)))


def contiguous_columns(columns: int) -> int:
    """Elements of a row that lie together: as wide as a swizzle atom can be."""
    return next(width for width, _ in _SWIZZLES if columns % width == 0)


def smem_layout(shape: tuple[int, int], stages: int = 1) -> cute.ComposedLayout:
    """Staged row-major tile of 16-bit elements, swizzled so that ldmatrix has no conflicts."""
    width = contiguous_columns(shape[1])
    swizzle = dict(_SWIZZLES)[width]
    atom = cute.make_composed_layout(
        cute.make_swizzle(*swizzle), 0, cute.make_layout((8, width), stride=(width, 1))
    )
    return cute.tile_to_shape(atom, (*shape, stages), order=(0, 1, 2))


def transposed(sX: cute.Tensor) -> cute.Tensor:
    """(rows, columns, stages) seen as (columns, rows, stages), in place."""
    rows, columns, stages = (cute.size(sX, mode=[i]) for i in range(3))
    return cute.composition(
        sX, cute.make_layout((columns, rows, stages), stride=(rows, 1, rows * columns))
    )


def tiled_mma(
    dtype: type[cutlass.Numeric], warps_m: int, warps_n: int = 1, columns: int = 16
) -> cute.TiledMma:
    """Warps stacked along M, then along N, each with `columns` at a time.

    Of 16 columns one ldmatrix fills two B operands; 8 are for warps that have no more.
    """
    op = warp.MmaF16BF16Op(dtype, Float32, _MMA)
    return cute.make_tiled_mma(
        op, (warps_m, warps_n, 1), permutation_mnk=(16 * warps_m, columns * warps_n, 16)
    )


class SmemOperand(NamedTuple):
    """An operand that is read from shared memory k-step by k-step."""

    copy: cute.TiledCopy
    source: cute.Tensor  # (CPY, MN, K, stages)
    target: cute.Tensor  # (CPY, MN, K) view of `fragment`
    fragment: cute.Tensor  # (MMA, MN, K)


def smem_operand(
    mma: cute.TiledMma,
    tidx: Int32,
    sX: cute.Tensor,
    operand: str,
    transpose: bool,
    matrices: int = 4,
) -> SmemOperand:
    """Operand "A" or "B", (MN, K, stages); `transpose` where K is not the contiguous mode.

    `matrices` of 8 x 8 are read at a time: 2 for a B of 8 columns a warp.
    """
    atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transpose, matrices), sX.element_type)
    thr_mma = mma.get_slice(tidx)
    if operand == "A":
        copy = cute.make_tiled_copy_A(atom, mma)
        fragment = thr_mma.make_fragment_A(thr_mma.partition_A(sX[None, None, 0]))
    else:
        copy = cute.make_tiled_copy_B(atom, mma)
        fragment = thr_mma.make_fragment_B(thr_mma.partition_B(sX[None, None, 0]))
    thread_copy = copy.get_slice(tidx)
    return SmemOperand(copy, thread_copy.partition_S(sX), thread_copy.retile(fragment), fragment)


@cute.jit
def load_fragment(operand: SmemOperand, stage: Int32):
    """All k-steps of a stage into registers."""
    for k in cutlass.range_constexpr(cute.size(operand.target, mode=[2])):
        load_step(operand, stage, k)


@cute.jit
def load_step(operand: SmemOperand, stage: Int32, k: Constexpr[int]):
    """One k-step of a stage into registers."""
    cute.copy(operand.copy, operand.source[None, None, k, stage], operand.target[None, None, k])


@cute.jit
def gemm(
    mma: cute.TiledMma,
    acc: cute.Tensor,
    fragments_A: cute.Tensor,  # (MMA, MMA_M, MMA_K)
    fragments_B: cute.Tensor,  # (MMA, MMA_N, MMA_K)
    load_A: Any,  # (SmemOperand, stage), or None where A is in registers
    load_B: tuple[SmemOperand, Int32],
):
    """acc += A B^T, with the next k-step on its way from shared memory while one is multiplied."""
    steps = cute.size(fragments_B, mode=[2])
    for k in cutlass.range_constexpr(-1, steps):
        if cutlass.const_expr(k + 1 < steps):
            if cutlass.const_expr(load_A is not None):
                load_step(load_A[0], load_A[1], k + 1)
            load_step(load_B[0], load_B[1], k + 1)
        if cutlass.const_expr(k >= 0):
            cute.gemm(mma, acc, fragments_A[None, None, k], fragments_B[None, None, k], acc)
