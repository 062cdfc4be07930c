"""Where tensor copies may put and take their boxes in shared memory."""

from __future__ import annotations

import numpy as np
import pytest

from hopperflash.emulator.errors import AddressError
from tests.support.hazards import RUNS
from tests.support.ptx import execute
from tests.support.tensor_maps import encode

SOURCE = np.arange(64 * 64, dtype=np.float16)


def copied(offset: int, swizzle: int, schedule: str, seed: int) -> tuple[np.ndarray, list[str]]:
    """What 8 rows of `swizzle` bytes are after a load and a store at a shared offset."""
    row = (swizzle or 64) // 2
    box = (row, 8)
    out = np.zeros(8 * row + 8, np.float16)
    target = out[(-out.ctypes.data % 16) // 2 :][: 8 * row]
    owner = np.zeros(512, np.uint8)
    maps = owner[-owner.ctypes.data % 64 :][:256]
    start = SOURCE[(-SOURCE.ctypes.data % 16) // 2 :]
    for i, array in enumerate((start, target)):
        raw = encode(array.ctypes.data, "f16", box, (2 * row,), box, swizzle)
        maps[128 * i : 128 * i + 128] = np.frombuffer(raw, np.uint8)
    body = f"""
        mov.u32 %r3, smem; setp.ne.u32 %p2, %r0, 0; mov.b32 %r40, 0; @%p2 bra READY;
        mbarrier.init.shared.b64 [%r3], 1; fence.mbarrier_init.release.cluster;
        mbarrier.arrive.expect_tx.shared.b64 _, [%r3], {16 * row};
        cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes
            [%r3+{offset}], [%d1, {{%r40, %r40}}], [%r3];
    READY:
        bar.sync 0;
    LOOP:
        mbarrier.try_wait.parity.shared.b64 %p3, [%r3], 0; @!%p3 bra LOOP; @%p2 bra DONE;
        add.s64 %d4, %d1, 128;
        cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group
            [%d4, {{%r40, %r40}}], [%r3+{offset}];
        cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
    DONE:
    """
    outcome = execute(body, out, maps, SOURCE, schedule=schedule, seed=seed)
    assert np.array_equal(target, start[: 8 * row])
    return target, outcome.hazards


@pytest.mark.parametrize("swizzle", [32, 64, 128])
def test_swizzled_boxes_lie_on_their_pattern(swizzle: int) -> None:
    pattern = 8 * swizzle
    for schedule, seed in RUNS:
        assert copied(2 * pattern + 2048, swizzle, schedule, seed)[1] == []
        found = copied(2 * pattern + 2048 + 128, swizzle, schedule, seed)[1]
        assert found or pattern == 128
        assert all("swizzle pattern misaligned" in hazard for hazard in found)


def test_boxes_lie_on_128_bytes() -> None:
    for schedule, seed in RUNS:
        assert copied(1024 + 128, 0, schedule, seed)[1] == []
        with pytest.raises(AddressError, match="not 128-byte aligned"):
            copied(1024 + 64, 0, schedule, seed)


def test_stores_take_boxes_from_128_bytes() -> None:
    raw = np.frombuffer(encode(SOURCE.ctypes.data & -16, "f16", (32, 8), (64,), (32, 8), 0), "u1")
    body = """
        mov.u32 %r3, smem; setp.ne.u32 %p2, %r0, 0; mov.b32 %r40, 0; @%p2 bra DONE;
        cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group
            [%d0, {{%r40, %r40}}], [%r3+{}];
        cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
    DONE:
    """
    execute(body.format(1024 + 128), raw, SOURCE.copy(), SOURCE)
    with pytest.raises(AddressError, match="not 128-byte aligned"):
        execute(body.format(1024 + 64), raw, SOURCE.copy(), SOURCE)
