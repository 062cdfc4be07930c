"""Ranges of blocks and turns as the device computes them, against their twin on the host."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from cutlass import Int32

from hopperflash import emulator
from hopperflash.plan import limits
from hopperflash.plan.block_range import Tiling, key_block_range, query_block_range
from hopperflash.plan.family import UNBOUNDED
from hopperflash.problem import MaskKind, MaskSpec
from tests.support.range_kernel import RangeKernel
from tests.support.sample_kernels import compile_kernel, fake_matrix

pytestmark = [pytest.mark.emulated, pytest.mark.xdist_group("block-range")]

TILE_M, TILE_N = 4, 6
Given = tuple[int, int, int, int, int, int]


def small(rng: random.Random) -> Given:
    """Blocks up to two past the last, as sequences have whose last rows do not count."""
    seqlen_q, seqlen_k = (rng.choice((0, 1, 12, rng.randrange(40))) for _ in "qk")
    m_block = rng.randrange(seqlen_q // TILE_M + 3)
    n_block = rng.randrange(seqlen_k // TILE_N + 3)
    left, right = (rng.choice((0, 1, rng.randrange(40), UNBOUNDED)) for _ in "lr")
    return m_block, n_block, seqlen_q, seqlen_k, left, right


def large(kind: MaskKind, rng: random.Random) -> Given:
    """Lengths and bounds up to the limits, where 32 bits might not do."""
    most = limits.WINDOW_SEQLEN_MAX if kind is MaskKind.WINDOW else limits.SEQLEN_MAX
    seqlen_q, seqlen_k = (rng.choice((5, most - 3, most, rng.randrange(1, most))) for _ in "qk")
    m_blocks, n_blocks = -(-seqlen_q // TILE_M), -(-seqlen_k // TILE_N)
    m_block = rng.choice((0, m_blocks - 1, rng.randrange(m_blocks)))
    n_block = rng.choice((0, n_blocks - 1, rng.randrange(n_blocks)))
    left, right = (rng.choice((0, most // 3, most - 1, UNBOUNDED - 1, UNBOUNDED)) for _ in "lr")
    return m_block, n_block, seqlen_q, seqlen_k, left, right


def computed(kind: MaskKind, given: list[Given]) -> Iterator[list[int]]:
    """(key blocks, query blocks, turn) of each problem, from the device."""
    kernel = compile_kernel(RangeKernel(kind, TILE_M, TILE_N), *(fake_matrix(Int32) for _ in "io"))
    found = torch.zeros(len(given), 16, dtype=torch.int32)
    rows = torch.zeros(len(given), 8, dtype=torch.int32)
    rows[:, :6] = torch.tensor(given)
    assert emulator.launch(kernel, rows, found).hazards == []
    yield from found[:, :9].tolist()


@pytest.mark.parametrize("kind", MaskKind)
def test_the_device_counts_as_the_host(kind: MaskKind) -> None:
    rng = random.Random(0)
    problems = [*(small(rng) for _ in range(3000)), *(large(kind, rng) for _ in range(1000))]
    for given, found in zip(problems, computed(kind, problems), strict=True):
        m_block, n_block, seqlen_q, seqlen_k, left, right = given
        mask = MaskSpec()
        if kind is not MaskKind.FULL:
            bounds = (None, 0) if kind is MaskKind.CAUSAL else (left, right)
            mask = MaskSpec(*(None if bound == UNBOUNDED else bound for bound in bounds))
        tiling = Tiling(seqlen_q, seqlen_k, TILE_M, TILE_N)
        keys, queries, turn = found[:4], found[4:8], found[8]
        none_of_queries, none_of_keys = m_block >= tiling.m_blocks, n_block >= tiling.n_blocks
        if none_of_queries:
            assert keys[0] >= keys[3], given
        else:
            want = key_block_range(mask, m_block, tiling)
            assert keys == [want.begin, want.unmasked_begin, want.unmasked_end, want.end], given
        if none_of_keys:
            assert queries[0] == queries[3], given
        else:
            want = query_block_range(mask, n_block, tiling)
            assert queries == [want.begin, want.unmasked_begin, want.unmasked_end, want.end], given
        if not none_of_queries and keys[0] <= n_block < keys[3]:
            first = keys[3] - 1 if kind is MaskKind.CAUSAL else keys[0]
            assert turn == abs(n_block - first), given
