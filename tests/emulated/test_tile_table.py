"""The kernel that lists the tiles of packed sequences, by itself, against a list made in Python."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import pytest
import torch

from hopperflash import emulator
from hopperflash.plan.config import TILE_FIELDS, TileTableConfig
from hopperflash.plan.launch_plan import KernelSpec
from hopperflash.plan.tile_tables import TILE_TABLE, TileTables
from hopperflash.problem import DType, MaskKind, Signature
from hopperflash.runtime.compile import compile_kernel
from tests.support.problems import packed_problem

pytestmark = [pytest.mark.emulated, pytest.mark.xdist_group("tile-table")]

TILE_M, TILE_N = 64, 128
CONFIG = TileTableConfig(TILE_M, TILE_N, descending_q=True)


class Side(NamedTuple):
    """cu_seqlens, rows, and where given seqused of Q or K."""

    offsets: list[int]
    total: int
    used: list[int] | None = None

    def rows(self) -> list[range]:
        """Those of every sequence, behind the last and before the first, whatever offsets say."""
        clamped = [min(max(offset, 0), self.total) for offset in self.offsets]
        sequences = [range(begin, max(begin, end)) for begin, end in pairwise(clamped)]
        return [*sequences, range(clamped[-1], self.total), range(clamped[0])]

    def seqlens(self) -> list[int]:
        """How many rows of each count."""
        rows = self.rows()[:-2]
        used = [len(each) for each in rows] if self.used is None else self.used
        counts = [min(max(n, 0), len(each)) for n, each in zip(used, rows, strict=True)]
        return [*counts, 0, 0]


def expected(q: Side, k: Side, of_queries: bool) -> list[tuple[int, ...]]:
    """Tiles in chunks of sequences, within a chunk those first that see most."""
    rows_q, rows_k = q.rows(), k.rows()
    seqlens_q, seqlens_k, parts = q.seqlens(), k.seqlens(), len(rows_q)
    cost = seqlens_k if of_queries else seqlens_q
    found = []
    for start in range(0, parts, CONFIG.threads):
        chunk = range(parts)[start : start + CONFIG.threads]
        for s in sorted(chunk, key=lambda s: -cost[s]):
            of_q = (rows_q[s].start, len(rows_q[s]), seqlens_q[s])
            of_k = (rows_k[s].start, len(rows_k[s]), seqlens_k[s])
            blocks = range(-(-len(rows_k[s]) // TILE_N))
            if of_queries:
                blocks = range(-(-len(rows_q[s]) // TILE_M))[::-1]
            found += [(block, s, *of_q, *of_k) for block in blocks]
    return found


def check(q: Side, k: Side) -> list[int]:
    """Compares the tables that a plan allocates; returns how many of their rows hold no tile."""
    config = replace(CONFIG, seqused=(q.used is not None, k.used is not None))
    buffers = TileTables(packed_problem(q.total, k.total, len(q.offsets) - 1), config).buffers()
    tables = [torch.full(buffer.shape, -7, dtype=torch.int32) for buffer in buffers]
    lengths = [
        None if values is None else torch.tensor(values, dtype=torch.int32)
        for values in (q.offsets, k.offsets, q.used, k.used)
    ]
    signature = Signature(DType.BFLOAT16, MaskKind.FULL)
    kernel = compile_kernel(KernelSpec(TILE_TABLE, config, signature, "sm_90a"))
    arguments: tuple[Any, ...] = (*lengths, *tables, q.total, k.total)
    assert emulator.launch(kernel, *arguments, schedule="random").hazards == []
    left = []
    for table, of_queries in zip(tables, (True, False), strict=True):
        assert table.shape[1] == len(TILE_FIELDS)
        want = expected(q, k, of_queries)[: len(table)]
        assert [tuple(row) for row in table[: len(want)].tolist()] == want
        assert (table[len(want) :, 0] == -1).all()
        left.append(len(table) - len(want))
    return left


def test_chunks_of_sequences_longest_first() -> None:
    rng = random.Random(0)
    lengths = [[rng.choice((0, 0, 1, 64, 65, 300)) for _ in range(600)] for _ in "qk"]
    offsets_q, offsets_k = (list(accumulate(side, initial=9)) for side in lengths)
    check(Side(offsets_q, offsets_q[-1] + 70), Side(offsets_k, offsets_k[-1]))


def test_tables_are_full_where_every_part_rounds_up_most() -> None:
    sides = (
        Side([1 + s * (tile + 1) for s in range(6)], 2 + 5 * (tile + 1))
        for tile in (TILE_M, TILE_N)
    )
    assert check(*sides) == [0, 0]


@pytest.mark.parametrize(
    "offsets",
    [(0, 500, 100, 600), (-(2**31), 300, 2**31 - 1, 10), (600, 0, 600, 0), (700, 800, 900, 901)],
    ids=["descending", "extreme", "overlapping", "behind the rows"],
)
def test_whatever_offsets_say_tiles_lie_within_the_rows(offsets: tuple[int, ...]) -> None:
    """Those on a GPU are not looked at before, and no kernel may address memory outside."""
    check(Side([*offsets], 600), Side([*offsets], 520))


def test_whatever_seqused_says_lengths_lie_within_their_sequences() -> None:
    offsets, used = [4, 200, 500, 500, 560], [-5, 2**31 - 1, 3, 60]
    check(Side(offsets, 600, used), Side(offsets, 600, used[::-1]))
