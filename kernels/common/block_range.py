"""Which key blocks a query block visits, and which of them need a mask."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32


class Seqlens(NamedTuple):
    """Lengths of one batch entry."""

    q: Int32
    k: Int32


class BlockRange(NamedTuple):
    """Key blocks [0, visited) of a query block; all its rows see all of blocks [0, unmasked)."""

    visited: Int32
    unmasked: Int32


@cute.jit
def key_block_range(
    m_block: Int32,
    seqlens: Seqlens,
    tile_m: Constexpr[int],
    tile_n: Constexpr[int],
    causal: Constexpr[bool],
) -> BlockRange:
    """Visited and unmasked key blocks; `hopperflash.plan.block_range` is the twin on the host.

    Causal, bottom-right aligned: row i sees the keys j < i + 1 + (seqlen_k - seqlen_q).
    """
    keys_first_row = seqlens.k
    keys_last_row = seqlens.k
    if cutlass.const_expr(causal):
        diagonal = 1 + seqlens.k - seqlens.q
        first_row = m_block * tile_m
        last_row = min(first_row + tile_m, seqlens.q) - 1
        keys_first_row = max(min(first_row + diagonal, seqlens.k), 0)
        keys_last_row = max(last_row + diagonal, 0)
    return BlockRange(
        visited=(keys_last_row + tile_n - 1) // tile_n,
        unmasked=keys_first_row // tile_n,
    )


class QueryBlockRange(NamedTuple):
    """Query blocks [begin, end) that see a key block; from `unmasked` on all pairs are visible."""

    begin: Int32
    unmasked: Int32
    end: Int32


@cute.jit
def query_block_range(
    n_block: Int32,
    seqlens: Seqlens,
    tile_m: Constexpr[int],
    tile_n: Constexpr[int],
    causal: Constexpr[bool],
) -> QueryBlockRange:
    """Visited and unmasked query blocks of a key block.

    Causal, bottom-right aligned: key j is seen by the queries i >= j - (seqlen_k - seqlen_q). The
    last key block needs a mask throughout where it is cut off by the end of the keys.
    """
    end = (seqlens.q + tile_m - 1) // tile_m
    begin = Int32(0)
    unmasked = Int32(0)
    first_key = n_block * tile_n
    if cutlass.const_expr(causal):
        diagonal = seqlens.k - seqlens.q
        begin = min(max(first_key - diagonal, 0) // tile_m, end)
        last_query_masked = max(first_key + tile_n - 1 - diagonal, 0)
        unmasked = min((last_query_masked + tile_m - 1) // tile_m, end)
    if first_key + tile_n > seqlens.k:
        unmasked = end
    return QueryBlockRange(begin, unmasked, end)
