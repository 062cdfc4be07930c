"""TMA atoms over dense (batch, seqlen, heads, head_dim) tensors and their per-tile partitions."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync


class TmaTensor(NamedTuple):
    """A TMA atom with the coordinate tensor that it copies from or to."""

    atom: cute.CopyAtom
    tensor: cute.Tensor


def sequence_major(mX: cute.Tensor) -> cute.Tensor:
    """(batch, seqlen, heads, head_dim) -> (seqlen, head_dim, heads, batch): tile modes first."""
    return cute.make_tensor(mX.iterator, cute.select(mX.layout, mode=[1, 3, 2, 0]))


def feature_major(mX: cute.Tensor) -> cute.Tensor:
    """(batch, seqlen, heads, head_dim) -> (head_dim, seqlen, heads, batch): the transposed tile."""
    return cute.make_tensor(mX.iterator, cute.select(mX.layout, mode=[3, 1, 2, 0]))


def load_atom(mX: cute.Tensor, layout: cute.ComposedLayout, tile: tuple[int, int]) -> TmaTensor:
    """Global to shared: what lies outside the tensor arrives as zeros."""
    return TmaTensor(
        *cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), mX, layout, tile)
    )


def store_atom(mX: cute.Tensor, layout: cute.ComposedLayout, tile: tuple[int, int]) -> TmaTensor:
    """Shared to global: what lies outside the tensor is not written."""
    return TmaTensor(
        *cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), mX, layout, tile)
    )


def reduce_add_atom(
    mX: cute.Tensor, layout: cute.ComposedLayout, tile: tuple[int, int]
) -> TmaTensor:
    """Shared added to global; what lies outside the tensor is not written."""
    op = cpasync.CopyReduceBulkTensorTileS2GOp(reduction_kind=cute.ReductionKind.ADD)
    return TmaTensor(*cpasync.make_tiled_tma_atom(op, mX, layout, tile))


def partition(tma: TmaTensor, sX: cute.Tensor, gX: cute.Tensor) -> tuple[Any, Any]:
    """Shared (TMA, stages...) and global (TMA, tiles...); a tile is the first two modes."""
    return cpasync.tma_partition(
        tma.atom, 0, cute.make_layout(1), cute.group_modes(sX, 0, 2), cute.group_modes(gX, 0, 2)
    )
