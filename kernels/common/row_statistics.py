"""Per-row results from an accumulator's registers to global memory."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from .layouts import mn_view


@cute.jit
def store_rows(
    values: cute.Tensor,  # (rows,) of a thread
    gX: cute.Tensor,  # (seqlen,)
    cO: cute.Tensor,  # identity of the tile that the accumulator covers
    thr_mma: cute.ThrMma,
    first_row: Int32,
):
    """One lane of the four that hold a row writes its value, if the row exists."""
    tOcO_mn = mn_view(thr_mma.partition_C(cO))
    if tOcO_mn[0, 0][1] == 0:
        for r in cutlass.range_constexpr(cute.size(values)):
            row = first_row + tOcO_mn[r, 0][0]
            if row < cute.size(gX):
                gX[row] = values[r]
