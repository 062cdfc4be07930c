"""Warpgroup MMA: swizzled shared layouts, tiled MMAs and the GEMM over one tile's K extent."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

_Kind = warpgroup.SmemLayoutAtomKind
_SWIZZLED_KINDS = {
    OperandMajorMode.K: ((128, _Kind.K_SW128), (64, _Kind.K_SW64), (32, _Kind.K_SW32)),
    OperandMajorMode.MN: ((128, _Kind.MN_SW128), (64, _Kind.MN_SW64), (32, _Kind.MN_SW32)),
}
THREADS_PER_WARPGROUP = 128
ROWS_PER_WARPGROUP = 64


def swizzle_kind(
    dtype: type[cutlass.Numeric], contiguous: int, major: OperandMajorMode
) -> warpgroup.SmemLayoutAtomKind:
    """The widest swizzle atom that divides `contiguous` elements."""
    extent_bytes = contiguous * dtype.width // 8
    return next(kind for width, kind in _SWIZZLED_KINDS[major] if extent_bytes % width == 0)


def smem_layout(
    dtype: type[cutlass.Numeric],
    shape: tuple[int, int],
    stages: int,
    major: OperandMajorMode,
    shares: int = 1,
) -> cute.ComposedLayout:
    """Staged shared layout (MN, K, stages) in the widest swizzle its contiguous extent allows.

    Warpgroups may split that extent into `shares`; a swizzle atom must not straddle two of them.
    """
    extent, order = (shape[1], (0, 1, 2)) if major is OperandMajorMode.K else (shape[0], (1, 0, 2))
    atom = warpgroup.make_smem_layout_atom(swizzle_kind(dtype, extent // shares, major), dtype)
    return cute.tile_to_shape(atom, (*shape, stages), order=order)


def row_slice(layout: cute.ComposedLayout, shape: tuple[int, int]) -> cute.ComposedLayout:
    """The layout of the first (rows, columns) of a staged shared tile, strides kept."""
    rows_columns = cute.select(cute.tiled_divide(layout.outer, shape), mode=[0])
    outer = cute.make_layout(rows_columns.shape[0], stride=rows_columns.stride[0])
    return cute.make_composed_layout(layout.inner, 0, outer)


def heads_view(layout: cute.ComposedLayout, heads: int, queries: int) -> cute.ComposedLayout:
    """A staged tile (rows, columns, 1) as (heads, queries, columns, 1): row r is head r % heads of
    query r // heads. Rows lie at one stride, since swizzle atoms stack along them first."""
    outer = layout.outer
    row_stride = cute.coalesce(cute.select(outer, mode=[0])).stride
    columns = cute.select(outer, mode=[1])
    return cute.make_composed_layout(
        layout.inner,
        0,
        cute.make_layout(
            (heads, queries, columns.shape, 1),
            stride=(row_stride, heads * row_stride, columns.stride, 0),
        ),
    )


def tiled_mma(
    dtype: type[cutlass.Numeric],
    tile_mn: tuple[int, int],
    a_source: warpgroup.OperandSource,
    b_major: OperandMajorMode,
    *,
    a_major: OperandMajorMode = OperandMajorMode.K,
    column_warpgroups: int = 1,
    row_warpgroups: int | None = None,
) -> cute.TiledMma:
    """m64nNk16 atoms, fp32 accumulation: the warpgroups are stacked along M, then split N.

    `row_warpgroups` are stacked, by default one for each 64 rows.
    """
    tile_m, tile_n = tile_mn
    op = warpgroup.MmaF16BF16Op(
        dtype,
        Float32,
        (ROWS_PER_WARPGROUP, tile_n // column_warpgroups, 16),
        a_source,
        a_major,
        b_major,
    )
    atoms = (row_warpgroups or tile_m // ROWS_PER_WARPGROUP, column_warpgroups, 1)
    return cute.make_tiled_mma(cute.make_mma_atom(op), atoms)


def warpgroup_slice(mma: cute.TiledMma, warpgroup_idx: Any) -> Any:
    """The slice whose shared-memory fragments are uniform over a warpgroup."""
    return mma.get_slice(warpgroup_idx * THREADS_PER_WARPGROUP)


def at_offset(fragment: cute.Tensor, offset: Int32) -> cute.Tensor:
    """The descriptors (MMA, MMA_M or N, MMA_K) of an operand with one stage, so far on.

    With an offset that the compiler does not know to be 0 it adds to the descriptor of the first
    k-step. Else each would be a sum of constants of its own, with a carry.
    """
    layout = fragment[None, None, None, 0].layout
    offsets = cute.append(layout, cute.make_layout(2, stride=1))
    return cute.make_tensor(fragment.iterator, offsets)[None, None, None, offset]


def row_block(fragment: cute.Tensor, block: int) -> cute.Tensor:
    """(MMA, 1, MMA_K) of an operand (MMA, MMA_M, MMA_K)."""
    part = fragment[None, block, None]
    (atom, k), (atom_stride, k_stride) = part.shape, part.stride
    return cute.make_tensor(
        part.iterator, cute.make_layout((atom, 1, k), stride=(atom_stride, 0, k_stride))
    )


@cute.jit
def gemm(
    mma: cute.TiledMma,
    acc: cute.Tensor,  # (MMA, MMA_M, MMA_N)
    fragments_A: cute.Tensor,  # (MMA, MMA_M, MMA_K)
    fragments_B: cute.Tensor,  # (MMA, MMA_N, MMA_K)
    accumulate: Constexpr[bool],
    fence: Constexpr[bool] = True,
):
    """acc (+)= A B^T as one committed group of wgmmas; the caller waits for it.

    The fence orders all registers that were touched before; right behind another GEMM there are
    none.
    """
    # An atom of its own: setting a field of `mma` here would leak out of the caller's loop.
    atom = cute.make_mma_atom(mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, accumulate)
    if cutlass.const_expr(fence):
        warpgroup.fence()
    for k in cutlass.range_constexpr(cute.size(fragments_A, mode=[2])):
        cute.gemm(atom, acc, fragments_A[None, None, k], fragments_B[None, None, k], acc)
        atom.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()
