"""Which K/V blocks a tile of query rows visits: the arithmetic the kernels' loops follow."""

from __future__ import annotations

from dataclasses import dataclass

from hopperflash.problem import MaskSpec


@dataclass(frozen=True)
class Tiling:
    """Two sequences cut into tiles of `tile_m` queries and `tile_n` keys."""

    seqlen_q: int
    seqlen_k: int
    tile_m: int
    tile_n: int

    @property
    def m_blocks(self) -> int:
        """Tiles of queries, the last one possibly partial."""
        return -(-self.seqlen_q // self.tile_m)

    @property
    def n_blocks(self) -> int:
        """Tiles of keys, the last one possibly partial."""
        return -(-self.seqlen_k // self.tile_n)


@dataclass(frozen=True)
class BlockRange:
    """K/V blocks of one m_block: `[begin, end)` are visited, `[full_begin, full_end)` unmasked.

    Every valid row sees every key of an unmasked block. Visited blocks to the right of those meet
    the diagonal or the end of the keys, those to the left the window's far edge. Where no block is
    unmasked, `full_begin == full_end == begin`.
    """

    begin: int
    full_begin: int
    full_end: int
    end: int

    @property
    def visited(self) -> int:
        """Blocks that are loaded."""
        return self.end - self.begin

    @property
    def unmasked(self) -> int:
        """Blocks computed without looking at coordinates."""
        return self.full_end - self.full_begin


@dataclass(frozen=True)
class BlockTotals:
    """(m_block, n_block) pairs of one head of one batch entry; `skipped` hold no visible pair."""

    visited: int
    unmasked: int
    skipped: int

    @property
    def masked(self) -> int:
        """Visited blocks that some row sees only a part of."""
        return self.visited - self.unmasked


def block_range(mask: MaskSpec, m_block: int, tiling: Tiling) -> BlockRange:
    """The blocks of `m_block`, exactly those with a visible pair.

    Bounds move right with the row, so the first and the last valid row decide.
    """
    first = m_block * tiling.tile_m
    last = min(first + tiling.tile_m, tiling.seqlen_q) - 1
    first_begin, first_end = mask.visible_range(first, tiling.seqlen_q, tiling.seqlen_k)
    last_begin, last_end = mask.visible_range(last, tiling.seqlen_q, tiling.seqlen_k)
    if last_begin >= last_end:
        return BlockRange(0, 0, 0, 0)
    begin = first_begin // tiling.tile_n
    end = -(-last_end // tiling.tile_n)
    full_begin = -(-last_begin // tiling.tile_n)
    full_end = first_end // tiling.tile_n
    if full_begin >= full_end:
        full_begin = full_end = begin
    return BlockRange(begin, full_begin, full_end, end)


def block_totals(mask: MaskSpec, tiling: Tiling) -> BlockTotals:
    """Blocks visited and skipped over all tiles of one head."""
    ranges = [block_range(mask, m_block, tiling) for m_block in range(tiling.m_blocks)]
    visited = sum(blocks.visited for blocks in ranges)
    return BlockTotals(
        visited=visited,
        unmasked=sum(blocks.unmasked for blocks in ranges),
        skipped=tiling.m_blocks * tiling.n_blocks - visited,
    )
