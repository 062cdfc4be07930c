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
