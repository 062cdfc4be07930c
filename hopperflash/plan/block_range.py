"""Which blocks a tile visits: key blocks of query rows forward, query blocks of keys backward.

Bounds move right with the row, so the first and the last row of a tile decide. The arithmetic that
the kernels' loops follow: `kernels/common/block_range.py` is the twin on the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

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
    """Blocks `[begin, end)` are visited, `[unmasked_begin, unmasked_end)` without a mask.

    Every valid row sees every key of an unmasked block. Where all blocks need a mask, the unmasked
    range is empty at that end where the loop starts to mask: of keys, which are walked from the
    end, at `begin`; of queries, which are walked from the beginning, at `end`.
    """

    begin: int
    unmasked_begin: int
    unmasked_end: int
    end: int

    @property
    def visited(self) -> int:
        """Blocks that are loaded."""
        return self.end - self.begin

    @property
    def unmasked(self) -> int:
        """Blocks computed without looking at coordinates."""
        return self.unmasked_end - self.unmasked_begin


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


def key_block_range(mask: MaskSpec, m_block: int, tiling: Tiling) -> BlockRange:
    """The key blocks of `m_block`, exactly those with a visible pair."""
    t = tiling
    first_row = m_block * t.tile_m
    first = _visible_keys(mask, first_row, t)
    last = _visible_keys(mask, min(first_row + t.tile_m, t.seqlen_q) - 1, t)
    end = _ceil_div(max(last.end, 0), t.tile_n)
    begin = min(first.begin // t.tile_n, end)
    unmasked_begin = _ceil_div(last.begin, t.tile_n)
    unmasked_end = max(first.end, 0) // t.tile_n
    if unmasked_begin >= unmasked_end:
        unmasked_begin = unmasked_end = begin
    return BlockRange(begin, unmasked_begin, unmasked_end, end)


def query_block_range(mask: MaskSpec, n_block: int, tiling: Tiling) -> BlockRange:
    """The query blocks of `n_block`, exactly those with a visible pair.

    All need a mask where the end of the keys cuts the n_block off. Rows past the last query need
    none.
    """
    t = tiling
    first_key, last_key = n_block * t.tile_n, (n_block + 1) * t.tile_n - 1
    first = _visible_queries(mask, first_key, t)
    last = _visible_queries(mask, last_key, t)
    # A last key past the end is seen until the last query, and so is the last there is.
    end = _ceil_div(max(last.end, 0), t.tile_m)
    begin = min(first.begin // t.tile_m, end)
    unmasked_begin = _ceil_div(last.begin, t.tile_m)
    unmasked_end = t.m_blocks if first.end == t.seqlen_q else max(first.end, 0) // t.tile_m
    if last_key >= t.seqlen_k or unmasked_begin >= unmasked_end:
        unmasked_begin = unmasked_end = end
    return BlockRange(begin, unmasked_begin, unmasked_end, end)


def key_block_totals(mask: MaskSpec, tiling: Tiling) -> BlockTotals:
    """Blocks visited and skipped over all query tiles of one head."""
    t = tiling
    shift = t.seqlen_k - t.seqlen_q
    # What a bound of the first or last row of a tile is before it is clipped to [0, seqlen_k].
    lines = [
        edge + shift + bound
        for edge in (0, t.tile_m - 1)
        for bound in (
            *(() if mask.left is None else (-mask.left,)),
            *(() if mask.right is None else (mask.right + 1,)),
        )
    ]
    breaks = _breaks(lines, t.tile_m, t.seqlen_k, t.m_blocks)
    period = t.tile_n // math.gcd(t.tile_m, t.tile_n)
    return _totals(lambda m: key_block_range(mask, m, t), breaks, period, t)


def query_block_totals(mask: MaskSpec, tiling: Tiling) -> BlockTotals:
    """Blocks visited and skipped over all key tiles, for one query head."""
    t = tiling
    shift = t.seqlen_q - t.seqlen_k
    lines = [
        edge + shift + bound
        for edge in (0, t.tile_n - 1)
        for bound in (
            *(() if mask.right is None else (-mask.right,)),
            *(() if mask.left is None else (mask.left + 1,)),
        )
    ]
    breaks = _breaks(lines, t.tile_n, t.seqlen_q, t.n_blocks)
    period = t.tile_m // math.gcd(t.tile_m, t.tile_n)
    return _totals(lambda n: query_block_range(mask, n, t), breaks, period, t)


@dataclass(frozen=True)
class _Span:
    """Indices `[begin, end)`; `end` may lie before `begin`, and below 0, where there are none."""

    begin: int
    end: int


def _visible_keys(mask: MaskSpec, query: int, tiling: Tiling) -> _Span:
    """Keys that a query sees."""
    diagonal = query + tiling.seqlen_k - tiling.seqlen_q
    begin = 0 if mask.left is None else max(diagonal - mask.left, 0)
    past = tiling.seqlen_k if mask.right is None else diagonal + mask.right + 1
    return _Span(begin, min(past, tiling.seqlen_k))


def _visible_queries(mask: MaskSpec, key: int, tiling: Tiling) -> _Span:
    """Queries that see a key, which may be past the last one."""
    diagonal = key + tiling.seqlen_q - tiling.seqlen_k
    begin = 0 if mask.right is None else max(diagonal - mask.right, 0)
    past = tiling.seqlen_q if mask.left is None else diagonal + mask.left + 1
    return _Span(begin, min(past, tiling.seqlen_q))


def _breaks(lines: Iterable[int], step: int, limit: int, blocks: int) -> list[int]:
    """Where runs of blocks begin whose bounds are all clipped alike; and `blocks`.

    A line starts at its value for block 0, rises by `step` a block, and is clipped to [0, limit].
    The last block may be partial.
    """
    found = {0, blocks, blocks - 1}
    for line in lines:
        found |= {_ceil_div(bound - line, step) for bound in (0, 1, limit, limit + 1)}
    return sorted(block for block in found if 0 <= block <= blocks)


def _totals(
    range_of: Callable[[int], BlockRange], breaks: list[int], period: int, tiling: Tiling
) -> BlockTotals:
    """Sums over all blocks, of lengths that may be too many to look at one by one.

    Within a run the bounds are constant or rise, all by the same, from a block to that `period`
    further on: counts are arithmetic progressions, save where there is nothing left to count.
    """
    visited = unmasked = 0
    for start, stop in pairwise(breaks):
        for block in range(start, min(start + period, stop)):
            blocks = range(block, stop, period)
            ends = [range_of(b) for b in (*blocks[:2], *blocks[-2:])]
            visited += _sum_of_progression([found.visited for found in ends], len(blocks))
            unmasked += _sum_of_progression([found.unmasked for found in ends], len(blocks))
    return BlockTotals(visited, unmasked, tiling.m_blocks * tiling.n_blocks - visited)


def _sum_of_progression(ends: Sequence[int], terms: int) -> int:
    """Sum of `max(0, a + b i)` over i in [0, terms), of which `ends` are the first two terms and
    the last two."""
    first, last = ends[0], ends[-1]
    if (first > 0 and last > 0) or first == last == 0:
        return terms * (first + last) // 2
    top, step = (first, first - ends[1]) if first > 0 else (last, last - ends[-2])
    positive = _ceil_div(top, step)
    return positive * top - step * (positive * (positive - 1) // 2)


def _ceil_div(size: int, step: int) -> int:
    return -(-size // step)
