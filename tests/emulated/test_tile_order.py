"""The order in which CTAs compute tiles."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from cutlass import Int32

from hopperflash import emulator
from hopperflash.plan.config import Scheduler
from tests.support.sample_kernels import compile_kernel, fake_matrix
from tests.support.tile_order_kernel import TileOrderKernel

pytestmark = [pytest.mark.emulated, pytest.mark.xdist_group("tile-order")]

BLOCKS, HEADS, BATCH, SWIZZLE, CTAS = 3, 4, 2, 2, 5


def expected(descending: bool, swizzle: int) -> list[tuple[int, int, int]]:
    """(block, head, batch) by number: `swizzle` heads together, block by block."""
    blocks = range(BLOCKS)[:: -1 if descending else 1]
    sections = range(0, HEADS, swizzle)
    return [
        (block, first + head, batch)
        for batch, first, block, head in product(range(BATCH), sections, blocks, range(swizzle))
    ]


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("scheduler", [Scheduler.SINGLE, Scheduler.PERSISTENT])
def test_a_cluster_has_neighbouring_blocks(scheduler: Scheduler, descending: bool) -> None:
    """Four blocks of two heads in turns, by two clusters of two, or one each."""
    sizes = (4, 2, 1, 2, 4)
    kernel = compile_kernel(
        TileOrderKernel(scheduler, descending, swizzled=True, cluster=2),
        fake_matrix(Int32),
        *(Int32(1) for _ in sizes),
    )
    found = torch.full((8, 8), -1, dtype=torch.int32)
    emulator.launch(kernel, found, *sizes)
    order = [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (3, 0), (2, 1), (3, 1)]
    if descending:
        order = [(3 - block, head) for block, head in order]
    assert [tuple(row) for row in found[:, :2].tolist()] == order
    ctas = 4 if scheduler is Scheduler.PERSISTENT else 8
    assert found[:, 3].tolist() == [number % ctas for number in range(8)]


@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("scheduler", [Scheduler.SINGLE, Scheduler.PERSISTENT])
def test_every_tile_has_its_place(scheduler: Scheduler, descending: bool, swizzled: bool) -> None:
    swizzle = SWIZZLE if swizzled else 1
    sizes = (BLOCKS, HEADS, BATCH, swizzle, CTAS)
    kernel = compile_kernel(
        TileOrderKernel(scheduler, descending, swizzled),
        fake_matrix(Int32),
        *(Int32(1) for _ in sizes),
    )
    found = torch.full((BLOCKS * HEADS * BATCH, 8), -1, dtype=torch.int32)
    emulator.launch(kernel, found, *sizes)
    assert [tuple(row) for row in found[:, :3].tolist()] == expected(descending, swizzle)
    ctas = CTAS if scheduler is Scheduler.PERSISTENT else len(found)
    assert found[:, 3].tolist() == [number % ctas for number in range(len(found))]
