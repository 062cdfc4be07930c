"""Which blocks a tile visits: K/V blocks of query rows forward, query blocks of keys backward.

The arithmetic that the kernels' loops follow.
"""

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
class QueryBlockRange:
    """Query blocks of one n_block: `[begin, end)` are visited, `[unmasked, end)` without a mask.

    Every valid row of an unmasked block sees every key of the n_block. The masked blocks come first
    and meet the diagonal; where the end of the keys cuts the n_block off, all are masked.
    """

    begin: int
    unmasked: int
    end: int


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


def query_block_range(mask: MaskSpec, n_block: int, tiling: Tiling) -> QueryBlockRange:
    """The query blocks of `n_block`, exactly those with a visible pair.

    Later queries see no fewer keys unless a window's left edge hides them, which no kernel masks
    yet: ValueError there.
    """
    if mask.left is not None:
        raise ValueError(f"no query blocks for a {mask}")
    first_key = n_block * tiling.tile_n
    last_key = min(first_key + tiling.tile_n, tiling.seqlen_k) - 1
    end = tiling.m_blocks
    begin = min(_first_query(mask, first_key, tiling) // tiling.tile_m, end)
    if first_key + tiling.tile_n > tiling.seqlen_k:
        return QueryBlockRange(begin, end, end)
    unmasked = -(-_first_query(mask, last_key, tiling) // tiling.tile_m)
    return QueryBlockRange(begin, min(unmasked, end), end)


def query_block_totals(mask: MaskSpec, tiling: Tiling) -> BlockTotals:
    """Blocks visited and skipped over all key tiles, for one query head."""
    ranges = [query_block_range(mask, n_block, tiling) for n_block in range(tiling.n_blocks)]
    visited = sum(blocks.end - blocks.begin for blocks in ranges)
    return BlockTotals(
        visited=visited,
        unmasked=sum(blocks.end - blocks.unmasked for blocks in ranges),
        skipped=tiling.m_blocks * tiling.n_blocks - visited,
    )


def _first_query(mask: MaskSpec, key: int, tiling: Tiling) -> int:
    """The first query that sees `key`, which may be past the last one."""
    if mask.right is None:
        return 0
    return max(0, key - mask.right - (tiling.seqlen_k - tiling.seqlen_q))
