"""Per-row results from an accumulator's registers to global memory.

Row r of a tile is head r % group of query r // group.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32

from .layouts import mn_view


@cute.jit
def store_rows(
    values: cute.Tensor,  # (rows,) of a thread
    gX: cute.Tensor,  # (group, queries)
    cO: cute.Tensor,  # identity of the tile that the accumulator covers
    thr_mma: cute.ThrMma,
    first_query: Int32,
):
    """One lane of the four that hold a row writes its value, if the row exists."""
    group = cute.size(gX, mode=[0])
    queries = cute.size(cO, mode=[0]) // group
    tOcO_mn = mn_view(thr_mma.partition_C(cO))
    if tOcO_mn[0, 0][1] == 0:
        for r in cutlass.range_constexpr(cute.size(values)):
            row = tOcO_mn[r, 0][0]
            query = first_query + row // group
            exists = query < cute.size(gX, mode=[1])
            if cutlass.const_expr(cute.size(cO, mode=[0]) % group != 0):
                exists = exists and row < group * queries
            if exists:
                gX[row % group, query] = values[r]


@cute.jit
def empty_rows(
    results: tuple[cute.Tensor, cute.Tensor],  # (rows,) of a thread: 1 / row sum, and LSE
    cO: cute.Tensor,  # identity of the tile that the accumulator covers
    thr_mma: cute.ThrMma,
    queries: Int32,
    group: Constexpr[int] = 1,
):
    """From number `queries` on no query sees a key: output 0, LSE -inf, whatever was computed."""
    inverse_sum, lse = results
    tOcO_mn = mn_view(thr_mma.partition_C(cO))
    for r in cutlass.range_constexpr(cute.size(lse)):
        exists = tOcO_mn[r, 0][0] // group < queries
        inverse_sum[r] = inverse_sum[r] if exists else Float32(0.0)
        lse[r] = lse[r] if exists else -Float32.inf
