"""TMA atoms over (batch, rows, heads, head_dim) tensors and their per-tile partitions.

Packed sequences lie one behind the other in the rows, and TMA only clips where its tensor ends. So
they are described as a tensor of `_RAGGED_ROWS` rows whose last row can be put anywhere: two more
modes of strides 2^34 - s and s, in elements, where s is a row's stride. With the coordinates
_RAGGED_ROWS and e in them, row _RAGGED_ROWS - n + i lies at

    (_RAGGED_ROWS - n + i) s + _RAGGED_ROWS (2^34 - s) + e s = (e - n + i) s + 2^64

which is row i of a sequence of n rows that ends before row e, since addresses wrap at 2^64 bytes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync

from ..common.sequence import Rows

_RAGGED_ROWS = 2**30
_RAGGED_END = 2**31 - 1


class TmaTensor(NamedTuple):
    """A TMA atom with the coordinate tensor that it copies from or to."""

    atom: cute.CopyAtom
    tensor: cute.Tensor


def sequence_major(mX: cute.Tensor, packed: bool = False) -> cute.Tensor:
    """(batch, rows, heads, head_dim) -> (rows, head_dim, heads, batch): tile modes first.

    Packed: (_RAGGED_ROWS, head_dim, heads, ., .).
    """
    return _in_order(mX, (1, 3, 2, 0), packed)


def feature_major(mX: cute.Tensor, packed: bool = False) -> cute.Tensor:
    """(batch, rows, heads, head_dim) -> (head_dim, rows, heads, batch): the transposed tile."""
    return _in_order(mX, (3, 1, 2, 0), packed)


def head_major(mX: cute.Tensor, packed: bool = False) -> cute.Tensor:
    """(batch, rows, heads, head_dim) -> (heads, rows, head_dim, batch): tiles of several heads."""
    return _in_order(mX, (2, 1, 3, 0), packed)


def _in_order(mX: cute.Tensor, modes: tuple[int, ...], packed: bool) -> cute.Tensor:
    layout = mX.layout
    if packed:
        row_stride = layout.stride[1]
        layout = cute.make_layout(
            (_RAGGED_END, _RAGGED_ROWS, *layout.shape[2:], _RAGGED_END),
            stride=(2**34 - row_stride, row_stride, *layout.stride[2:], row_stride),
        )
        modes = (*modes, 4)
    return cute.make_tensor(mX.iterator, cute.select(layout, mode=list(modes)))


def head_rows(tma: TmaTensor, head: Int32, batch: Int32, rows: Rows, packed: bool) -> cute.Tensor:
    """(rows, head_dim) of one head of a sequence, from a `sequence_major` tensor."""
    gX = tma.tensor[(None, None, head, *_sequence(batch, rows, packed))]
    return cute.domain_offset((_RAGGED_ROWS - rows.count, 0), gX) if packed else gX


def head_columns(
    tma: TmaTensor, head: Int32, batch: Int32, rows: Rows, packed: bool
) -> cute.Tensor:
    """(head_dim, rows) of one head of a sequence, from a `feature_major` tensor."""
    gX = tma.tensor[(None, None, head, *_sequence(batch, rows, packed))]
    return cute.domain_offset((0, _RAGGED_ROWS - rows.count), gX) if packed else gX


def heads_rows(tma: TmaTensor, batch: Int32, rows: Rows, packed: bool) -> cute.Tensor:
    """(heads, rows, head_dim) of a sequence, from a `head_major` tensor."""
    gX = tma.tensor[(None, None, None, *_sequence(batch, rows, packed))]
    return cute.domain_offset((0, _RAGGED_ROWS - rows.count, 0), gX) if packed else gX


def _sequence(batch: Int32, rows: Rows, packed: bool) -> tuple[Any, ...]:
    """Coordinates of the last modes."""
    return (_RAGGED_ROWS, rows.first + rows.count) if packed else (batch,)


def load_atom(
    mX: cute.Tensor, layout: cute.ComposedLayout, tile: tuple[int, ...], multicast: bool = False
) -> TmaTensor:
    """Global to shared: what lies outside the tensor arrives as zeros.

    With `multicast` a copy fills the same place in each CTA that its mask names.
    """
    op = cpasync.CopyBulkTensorTileG2SOp()
    if multicast:
        op = cpasync.CopyBulkTensorTileG2SMulticastOp()
    return TmaTensor(*cpasync.make_tiled_tma_atom(op, mX, layout, tile))


def store_atom(mX: cute.Tensor, layout: cute.ComposedLayout, tile: tuple[int, ...]) -> TmaTensor:
    """Shared to global: what lies outside the tensor is not written."""
    return TmaTensor(
        *cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), mX, layout, tile)
    )


def partition(
    tma: TmaTensor, sX: cute.Tensor, gX: cute.Tensor, tile_modes: int = 2
) -> tuple[Any, Any]:
    """Shared (TMA, stages...) and global (TMA, tiles...); a tile is the first `tile_modes`."""
    return cpasync.tma_partition(
        tma.atom,
        0,
        cute.make_layout(1),
        cute.group_modes(sX, 0, tile_modes),
        cute.group_modes(gX, 0, tile_modes),
    )
