"""Per-row results from an accumulator's registers to global memory."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

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


@cute.jit
def empty_rows(
    results: tuple[cute.Tensor, cute.Tensor],  # (rows,) of a thread: 1 / row sum, and LSE
    cO: cute.Tensor,  # identity of the tile that the accumulator covers
    thr_mma: cute.ThrMma,
    rows: Int32,
):
    """Rows from number `rows` on see no key: output 0 and LSE -inf, whatever was computed."""
    inverse_sum, lse = results
    tOcO_mn = mn_view(thr_mma.partition_C(cO))
    for r in cutlass.range_constexpr(cute.size(lse)):
        exists = tOcO_mn[r, 0][0] < rows
        inverse_sum[r] = inverse_sum[r] if exists else Float32(0.0)
        lse[r] = lse[r] if exists else -Float32.inf
