"""The order in which tiles of dQ lie in memory while key tiles add to them.

A tensor-core accumulator gives a thread four values of every 16 rows and eight columns: of row
lane / 4 and of that eight below, the columns 2 (lane % 4) and the next (PTX ISA, the fragment D of
wgmma.mma_async.m64nNk16). They are neighbours here, so that a thread adds them by one instruction
and a warp adds to 512 bytes on end. Tiles are whole: rows past the last query get zeros added.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32, Int64

ROWS, COLUMNS = 16, 8
HALF = ROWS // 2
_VALUES = 4  # of a thread
OCTET_BYTES = ROWS * COLUMNS * 4


def tile_fragments(
    gX: cute.Tensor,  # (rows columns,) fp32
    rows: Any,
    columns: Any,
) -> cute.Tensor:
    """(values, lanes, octets of columns, groups of rows) of a tile."""
    shape = (_VALUES, cute.arch.WARP_SIZE, columns // COLUMNS, rows // ROWS)
    return cute.make_tensor(gX.iterator, cute.make_layout(shape))


@cute.jit
def load_row_pair(
    sums: cute.Tensor,  # (2, 8) out
    gX: cute.Tensor,  # `tile_fragments`
    row: Int32,  # in the tile, of the first half of its group
    octet: Int32,
):
    """Eight columns of a row, and of the one eight below."""
    lanes = COLUMNS // 2
    first_lane = gX[None, row % HALF * lanes, octet, row // ROWS]
    quads = cute.make_tensor(first_lane.iterator, cute.make_layout(_VALUES * lanes))
    values = cute.make_rmem_tensor_like(quads)
    cute.autovec_copy(quads, values)
    # (row, (column of a pair, lane))
    pair = cute.make_layout((2, (2, lanes)), stride=(2, (1, _VALUES)))
    sums.store(cute.make_tensor(values.iterator, pair).load())


@cute.jit
def load_column_pair(
    sums: cute.Tensor,  # (2, 16) out
    gX: cute.Tensor,  # `tile_fragments`
    column: Int32,  # in the tile, even
    group: Int32,
):
    """A group of rows of a column, and of the next one."""
    lanes = COLUMNS // 2
    for row in cutlass.range_constexpr(HALF):
        values = cute.make_rmem_tensor(_VALUES, gX.element_type)
        lane = row * lanes + column % COLUMNS // 2
        cute.autovec_copy(gX[None, lane, column // COLUMNS, group], values)
        for half in cutlass.range_constexpr(2):
            sums[0, row + half * HALF] = values[2 * half]
            sums[1, row + half * HALF] = values[2 * half + 1]


def by_octet(acc: cute.Tensor) -> cute.Tensor:
    """(values, octets of columns) of a thread's accumulator of 16 rows."""
    octets = cute.size(acc) // _VALUES
    return cute.make_tensor(acc.iterator, cute.make_layout((_VALUES, octets)))


@cute.jit
def add_values(address: Int64, octet: Constexpr[int], values: cute.Tensor):
    """Adds (4,) fp32 of a thread, so many octets behind an address."""
    a, b, c, d = (values[i] for i in range(_VALUES))
    offset = octet * OCTET_BYTES
    cute.arch.inline_ptx(
        f"red.relaxed.gpu.global.add.v4.f32 [{{$r0}}+{offset}], "
        "{{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[address, a, b, c, d],
    )
