"""Visited and unmasked blocks against the visibility of every pair in them."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hopperflash.plan.block_range import (
    BlockRange,
    Tiling,
    key_block_range,
    key_block_totals,
    query_block_range,
    query_block_totals,
)
from hopperflash.problem import MaskSpec

bounds = st.one_of(st.none(), st.integers(0, 30))
lengths = st.integers(1, 40)
tiles = st.integers(1, 9)
masks = st.builds(MaskSpec, bounds, bounds)
tilings = st.builds(Tiling, lengths, lengths, tiles, tiles)

SMALL = range(1, 7)
EVERY_MASK = [MaskSpec(*pair) for pair in product((None, 0, 1, 2, 4), repeat=2)]


def check_key_blocks(mask: MaskSpec, tiling: Tiling) -> None:
    sq, sk = tiling.seqlen_q, tiling.seqlen_k
    for m_block in range(tiling.m_blocks):
        rows = range(m_block * tiling.tile_m, min((m_block + 1) * tiling.tile_m, sq))
        visited, unmasked = [], []
        for n_block in range(tiling.n_blocks):
            keys = range(n_block * tiling.tile_n, (n_block + 1) * tiling.tile_n)
            seen = [j < sk and mask.visible(i, j, sq, sk) for i in rows for j in keys]
            visited += [n_block] if any(seen) else []
            unmasked += [n_block] if all(seen) else []
        blocks = key_block_range(mask, m_block, tiling)
        assert list(range(blocks.begin, blocks.end)) == visited
        assert list(range(blocks.unmasked_begin, blocks.unmasked_end)) == unmasked
        assert blocks.begin <= blocks.unmasked_begin <= blocks.unmasked_end <= blocks.end
        assert unmasked or blocks.unmasked_begin == blocks.begin


def check_query_blocks(mask: MaskSpec, tiling: Tiling) -> None:
    sq, sk = tiling.seqlen_q, tiling.seqlen_k
    for n_block in range(tiling.n_blocks):
        keys = range(n_block * tiling.tile_n, (n_block + 1) * tiling.tile_n)
        visited, unmasked = [], []
        for m_block in range(tiling.m_blocks):
            rows = range(m_block * tiling.tile_m, min((m_block + 1) * tiling.tile_m, sq))
            seen = [j < sk and mask.visible(i, j, sq, sk) for i in rows for j in keys]
            visited += [m_block] if any(seen) else []
            unmasked += [m_block] if all(seen) else []
        blocks = query_block_range(mask, n_block, tiling)
        assert list(range(blocks.begin, blocks.end)) == visited
        # A block that only its own end makes whole may be masked all the same.
        assert set(range(blocks.unmasked_begin, blocks.unmasked_end)) <= set(unmasked)
        assert len(unmasked) - blocks.unmasked <= int(sq % tiling.tile_m > 0)
        assert blocks.begin <= blocks.unmasked_begin <= blocks.unmasked_end <= blocks.end
        assert blocks.unmasked or blocks.unmasked_begin == blocks.end


@pytest.mark.parametrize("mask", EVERY_MASK, ids=str)
def test_every_small_problem(mask):
    for tile_m, tile_n in product((1, 2, 3), repeat=2):
        for seqlen_q, seqlen_k in product(SMALL, repeat=2):
            tiling = Tiling(seqlen_q, seqlen_k, tile_m, tile_n)
            check_key_blocks(mask, tiling)
            check_query_blocks(mask, tiling)


@given(masks, tilings)
def test_blocks_are_exactly_those_that_matter(mask, tiling):
    check_key_blocks(mask, tiling)
    check_query_blocks(mask, tiling)


@given(masks, st.builds(Tiling, st.integers(0, 99), st.integers(0, 99), tiles, tiles))
def test_totals_are_sums(mask, tiling):
    for totals, range_of, blocks in (
        (key_block_totals(mask, tiling), key_block_range, tiling.m_blocks),
        (query_block_totals(mask, tiling), query_block_range, tiling.n_blocks),
    ):
        ranges = [range_of(mask, block, tiling) for block in range(blocks)]
        assert totals.visited == sum(found.visited for found in ranges)
        assert totals.unmasked == sum(found.unmasked for found in ranges)
        assert totals.visited == totals.unmasked + totals.masked
        assert totals.visited + totals.skipped == tiling.m_blocks * tiling.n_blocks


@given(masks, tilings)
def test_both_directions_visit_the_same_blocks(mask, tiling):
    forward, backward = key_block_totals(mask, tiling), query_block_totals(mask, tiling)
    assert (forward.visited, forward.skipped) == (backward.visited, backward.skipped)


@pytest.mark.parametrize("totals", [key_block_totals, query_block_totals])
def test_totals_of_lengths_beyond_counting(totals):
    """A window of 64 blocks: as many and one more in every row, less what the corner cuts off."""
    tile, blocks, wide = 128, 10**8, 64
    found = totals(MaskSpec(wide * tile, 0), Tiling(blocks * tile, blocks * tile, tile, tile))
    assert found.visited == blocks * (wide + 1) - wide * (wide + 1) // 2
    assert found.masked == blocks + (blocks - wide)


@pytest.mark.parametrize("tile", [64, 128])
def test_causal_square_masks_only_the_diagonal(tile):
    totals = key_block_totals(MaskSpec(None, 0), Tiling(tile * 8, tile * 8, tile, tile))
    assert (totals.visited, totals.masked, totals.skipped) == (36, 8, 28)


def test_rows_before_the_first_key_visit_nothing():
    assert key_block_range(MaskSpec(None, 0), 0, Tiling(64, 16, 16, 16)).visited == 0


@pytest.mark.parametrize(
    ("mask", "n_block", "tiling", "expected"),
    [
        (MaskSpec(), 0, Tiling(100, 128, 64, 64), (0, 0, 2, 2)),
        (MaskSpec(), 1, Tiling(100, 127, 64, 64), (0, 2, 2, 2)),
        (MaskSpec(None, 0), 1, Tiling(256, 256, 64, 64), (1, 2, 4, 4)),
        (MaskSpec(None, 0), 0, Tiling(256, 256, 64, 128), (0, 2, 4, 4)),
        (MaskSpec(None, 0), 1, Tiling(256, 320, 64, 64), (0, 1, 4, 4)),
        (MaskSpec(None, 0), 0, Tiling(320, 256, 64, 64), (1, 2, 5, 5)),
        (MaskSpec(None, 0), 0, Tiling(17, 1, 64, 64), (0, 1, 1, 1)),
        (MaskSpec(128, 0), 1, Tiling(512, 512, 64, 64), (1, 2, 3, 4)),
        (MaskSpec(63, 0), 1, Tiling(512, 512, 64, 64), (1, 3, 3, 3)),
        (MaskSpec(128, None), 0, Tiling(512, 512, 64, 64), (0, 0, 2, 3)),
    ],
    ids=[
        *("full", "cut keys", "diagonal", "two on the diagonal", "more keys", "more queries"),
        *("one", "window", "no block inside the window", "left bound alone"),
    ],
)
def test_query_blocks_by_hand(mask, n_block, tiling, expected):
    assert query_block_range(mask, n_block, tiling) == BlockRange(*expected)
