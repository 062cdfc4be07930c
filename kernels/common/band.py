"""Which keys a query sees, as kernels know it: a kind at compile time, bounds at run time.

Bottom-right aligned: query i sees key j iff i + (seqlen_k - seqlen_q) - left <= j and
j <= i + (seqlen_k - seqlen_q) + right. `hopperflash.problem.mask` is the twin on the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32

from hopperflash.problem.mask import MaskKind


class Seqlens(NamedTuple):
    """Lengths of one batch entry."""

    q: Int32
    k: Int32


@dataclass(frozen=True)
class Band:
    """A mask; the bounds are those of a window, and so large where it has none on a side that no
    sequence reaches them. `group` consecutive rows of a query tile are one query of as many heads.
    """

    kind: Constexpr[MaskKind]
    left: Int32
    right: Int32
    group: Constexpr[int] = 1

    @property
    def full(self) -> bool:
        return self.kind is MaskKind.FULL

    @property
    def causal(self) -> bool:
        return self.kind is MaskKind.CAUSAL

    @property
    def window(self) -> bool:
        return self.kind is MaskKind.WINDOW


class Span(NamedTuple):
    """Indices [begin, end)."""

    begin: Int32
    end: Int32


@cute.jit
def visible_keys(band: Band, query: Int32, seqlens: Seqlens):
    """Keys that a query sees; `end` may be negative where it sees none."""
    begin, end = Int32(0), seqlens.k
    if cutlass.const_expr(band.causal):
        end = min(query + 1 + seqlens.k - seqlens.q, seqlens.k)
    if cutlass.const_expr(band.window):
        diagonal = query + seqlens.k - seqlens.q
        begin = max(diagonal - band.left, 0)
        end = min(diagonal + band.right + 1, seqlens.k)
    return Span(begin, end)


@cute.jit
def visible_queries(band: Band, key: Int32, seqlens: Seqlens):
    """Queries that see a key; `end` may be negative where none does."""
    edges = query_edges(band, key, seqlens)
    return Span(max(edges.begin, 0), min(edges.end, seqlens.q))


@cute.jit
def query_edges(band: Band, key: Int32, seqlens: Seqlens):
    """The queries between which a band's edges cut the column of a key, whether they exist or not:
    both are one further for the next key."""
    begin, end = Int32(0), seqlens.q
    diagonal = key - (seqlens.k - seqlens.q)
    if cutlass.const_expr(band.causal):
        begin = diagonal
    if cutlass.const_expr(band.window):
        begin, end = diagonal - band.right, diagonal + band.left + 1
    return Span(begin, end)
