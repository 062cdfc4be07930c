"""Which blocks a tile visits, and which of them need no mask.

Bounds move right with the row, so the first and the last row of a tile decide.
`hopperflash.plan.block_range` is the twin on the host.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32, Uint32

from .band import Band, Seqlens, visible_keys, visible_queries


class BlockRange(NamedTuple):
    """Blocks [begin, end) are visited, [unmasked_begin, unmasked_end) without a mask.

    Where all need one, the unmasked range is empty at that end from which the loop starts: keys are
    walked from the end, queries from the beginning.
    """

    begin: Int32
    unmasked_begin: Int32
    unmasked_end: Int32
    end: Int32


@cute.jit
def whole_blocks(count: Int32, tile: Constexpr[int]):
    """Blocks of `tile` in a count that is not negative.

    Divided without a sign: what a sign takes seems divergent to the compiler where `tile` is no
    power of two, and what loops up to there carry is then kept out of uniform registers, wgmma's
    descriptors too.
    """
    return Int32(Uint32(count) // tile)


@cute.jit
def key_block_range(
    m_block: Int32,
    seqlens: Seqlens,
    band: Band,
    tile_m: Constexpr[int],
    tile_n: Constexpr[int],
):
    """Key blocks of a query block."""
    first_row = m_block * tile_m
    first = visible_keys(band, first_row, seqlens)
    last = visible_keys(band, min(first_row + tile_m, seqlens.q) - 1, seqlens)
    begin, unmasked_begin = Int32(0), Int32(0)
    unmasked_end = whole_blocks(max(first.end, 0), tile_n)
    end = whole_blocks(max(last.end, 0) + tile_n - 1, tile_n)
    # The first row may lie past the last query, where no row of the tile is one.
    if first_row >= seqlens.q:
        unmasked_end, end = Int32(0), Int32(0)
    if cutlass.const_expr(band.window):
        begin = min(whole_blocks(first.begin, tile_n), end)
        unmasked_begin = whole_blocks(last.begin + tile_n - 1, tile_n)
        if unmasked_begin >= unmasked_end:
            unmasked_begin, unmasked_end = begin, begin
    return BlockRange(begin, unmasked_begin, unmasked_end, end)


@cute.jit
def query_block_range(
    n_block: Int32,
    seqlens: Seqlens,
    band: Band,
    tile_m: Constexpr[int],
    tile_n: Constexpr[int],
):
    """Query blocks of a key block; all need a mask where the end of the keys cuts the block off."""
    first_key = n_block * tile_n
    last_key = first_key + tile_n - 1
    first = visible_queries(band, first_key, seqlens)
    blocks = (seqlens.q + tile_m - 1) // tile_m
    begin, unmasked_begin = Int32(0), Int32(0)
    unmasked_end, end = blocks, blocks
    if cutlass.const_expr(not band.full):
        begin = min(first.begin // tile_m, blocks)
        last = visible_queries(band, last_key, seqlens)
        unmasked_begin = min((last.begin + tile_m - 1) // tile_m, blocks)
    if cutlass.const_expr(band.window):
        # A last key past the end is seen until the last query, and so is the last there is.
        end = (max(last.end, 0) + tile_m - 1) // tile_m
        begin = min(begin, end)
        # Rows past the last query need no mask.
        if first.end < seqlens.q:
            unmasked_end = max(first.end, 0) // tile_m
    cut_off = last_key >= seqlens.k
    if cutlass.const_expr(band.window):
        cut_off = cut_off or unmasked_begin >= unmasked_end
    if cut_off:
        unmasked_begin, unmasked_end = end, end
    # No query sees a tile without a key, and no turn is kept for it.
    if first_key >= seqlens.k:
        begin = end
    return BlockRange(begin, unmasked_begin, unmasked_end, end)
