"""Visited and unmasked blocks against the visibility of every pair in them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hopperflash.plan.block_range import (
    Tiling,
    block_range,
    block_totals,
    query_block_range,
    query_block_totals,
)
from hopperflash.problem import MaskSpec

bounds = st.one_of(st.none(), st.integers(0, 30))
lengths = st.integers(1, 40)
tiles = st.integers(1, 9)


@given(bounds, bounds, st.builds(Tiling, lengths, lengths, tiles, tiles))
def test_blocks_are_exactly_those_that_matter(left, right, tiling):
    mask = MaskSpec(left, right)
    sq, sk = tiling.seqlen_q, tiling.seqlen_k
    for m_block in range(tiling.m_blocks):
        rows = range(m_block * tiling.tile_m, min((m_block + 1) * tiling.tile_m, sq))
        visited, unmasked = [], []
        for n_block in range(tiling.n_blocks):
            keys = range(n_block * tiling.tile_n, (n_block + 1) * tiling.tile_n)
            seen = [j < sk and mask.visible(i, j, sq, sk) for i in rows for j in keys]
            visited += [n_block] if any(seen) else []
            unmasked += [n_block] if all(seen) else []
        blocks = block_range(mask, m_block, tiling)
        assert list(range(blocks.begin, blocks.end)) == visited
        assert list(range(blocks.full_begin, blocks.full_end)) == unmasked
        assert blocks.begin <= blocks.full_begin <= blocks.full_end <= blocks.end


def test_totals_add_up():
    tiling = Tiling(seqlen_q=1000, seqlen_k=1200, tile_m=128, tile_n=176)
    ranges = [block_range(MaskSpec(300, 0), m, tiling) for m in range(tiling.m_blocks)]
    totals = block_totals(MaskSpec(300, 0), tiling)
    assert totals.visited == sum(blocks.visited for blocks in ranges)
    assert totals.visited == totals.unmasked + totals.masked
    assert totals.visited + totals.skipped == tiling.m_blocks * tiling.n_blocks


@pytest.mark.parametrize("tile", [64, 128])
def test_causal_square_masks_only_the_diagonal(tile):
    totals = block_totals(MaskSpec(None, 0), Tiling(tile * 8, tile * 8, tile, tile))
    assert (totals.visited, totals.masked, totals.skipped) == (36, 8, 28)


def test_rows_before_the_first_key_visit_nothing():
    assert block_range(MaskSpec(None, 0), 0, Tiling(64, 16, 16, 16)).visited == 0


@given(bounds, st.builds(Tiling, lengths, lengths, tiles, tiles))
def test_query_blocks_are_exactly_those_that_matter(right, tiling):
    mask = MaskSpec(None, right)
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
        assert set(range(blocks.unmasked, blocks.end)) <= set(unmasked)
        assert len(unmasked) - (blocks.end - blocks.unmasked) <= int(sq % tiling.tile_m > 0)
        assert blocks.begin <= blocks.unmasked <= blocks.end


@given(bounds, st.builds(Tiling, lengths, lengths, tiles, tiles))
def test_both_directions_visit_the_same_blocks(right, tiling):
    forward = block_totals(MaskSpec(None, right), tiling)
    backward = query_block_totals(MaskSpec(None, right), tiling)
    assert (forward.visited, forward.skipped) == (backward.visited, backward.skipped)


@pytest.mark.parametrize(
    ("mask", "n_block", "tiling", "expected"),
    [
        (MaskSpec(), 0, Tiling(100, 128, 64, 64), (0, 0, 2)),
        (MaskSpec(), 1, Tiling(100, 127, 64, 64), (0, 2, 2)),
        (MaskSpec(None, 0), 1, Tiling(256, 256, 64, 64), (1, 2, 4)),
        (MaskSpec(None, 0), 0, Tiling(256, 256, 64, 128), (0, 2, 4)),
        (MaskSpec(None, 0), 1, Tiling(256, 320, 64, 64), (0, 1, 4)),
        (MaskSpec(None, 0), 0, Tiling(320, 256, 64, 64), (1, 2, 5)),
        (MaskSpec(None, 0), 0, Tiling(17, 1, 64, 64), (0, 1, 1)),
    ],
    ids=["full", "cut keys", "diagonal", "two on the diagonal", "more keys", "more queries", "one"],
)
def test_query_blocks_by_hand(mask, n_block, tiling, expected):
    blocks = query_block_range(mask, n_block, tiling)
    assert (blocks.begin, blocks.unmasked, blocks.end) == expected


def test_query_blocks_of_a_window_are_refused():
    with pytest.raises(ValueError, match="left 5"):
        query_block_range(MaskSpec(5, 0), 0, Tiling(64, 64, 16, 16))
