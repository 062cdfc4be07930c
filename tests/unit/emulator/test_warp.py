"""Warp-wide opcodes and their member masks, against loops over lanes."""

from __future__ import annotations

import functools
import operator

import numpy as np
import pytest

from hopperflash.emulator.errors import DeadlockError, EmulationError
from tests.support.ptx import execute

SCHEDULES = ["eager", "lazy", "random"]
LOAD = "add.s64 %d20, %d1, %d30; ld.global.b32 %r8, [%d20];"
STORE = "add.s64 %d21, %d0, %d30; st.global.b32 [%d21], %r9;"
EVEN = 0x55555555


def values(seed: int = 0, n: int = 64) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**32, n, dtype=np.uint32)


def warps(x: np.ndarray) -> np.ndarray:
    return x.reshape(-1, 32)


REDUCTIONS = {
    "add.u32": lambda x: sum(map(int, x)) % 2**32,
    "min.s32": lambda x: min(map(int, x.view(np.int32))) % 2**32,
    "max.u32": lambda x: max(map(int, x)),
    "and.b32": lambda x: functools.reduce(operator.and_, map(int, x)),
    "xor.b32": lambda x: functools.reduce(operator.xor, map(int, x)),
}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_redux_within_the_mask(name: str) -> None:
    """Even and odd lanes execute it apart, each half with its own mask."""
    x, out = values(), np.zeros(64, np.uint32)
    body = f"""
        {LOAD} and.b32 %r1, %r0, 1; shl.b32 %r2, {EVEN}, %r1;
        redux.sync.{name} %r9, %r8, %r2; {STORE}
    """
    execute(body, out, x, threads=64)
    for given, got in zip(warps(x), warps(out), strict=True):
        for part in (slice(0, 32, 2), slice(1, 32, 2)):
            assert (got[part] == REDUCTIONS[name](given[part])).all()


def test_votes_within_the_mask() -> None:
    x, out = values(1) & 1, np.zeros((4, 64), np.uint32)
    body = f"""
        {LOAD} setp.ne.u32 %p1, %r8, 0; and.b32 %r1, %r0, 1; shl.b32 %r2, {EVEN}, %r1;
        vote.sync.ballot.b32 %r10, %p1, %r2;
        vote.sync.any.pred %p2, %p1, %r2; selp.b32 %r11, 1, 0, %p2;
        vote.sync.all.pred %p3, %p1, %r2; selp.b32 %r12, 1, 0, %p3;
        vote.sync.uni.pred %p4, !%p1, %r2; selp.b32 %r13, 1, 0, %p4;
        add.s64 %d21, %d0, %d30; st.global.b32 [%d21], %r10; st.global.b32 [%d21+256], %r11;
        st.global.b32 [%d21+512], %r12; st.global.b32 [%d21+768], %r13;
    """
    x[:32:2] = 1
    execute(body, out, x, threads=64)
    for lane in range(64):
        group = [i for i in range(lane & 32, (lane & 32) + 32) if i % 2 == lane % 2]
        flags = [bool(x[i]) for i in group]
        ballot = sum(1 << (i & 31) for i in group if x[i])
        expected = [ballot, any(flags), all(flags), len(set(flags)) == 1]
        assert out[:, lane].tolist() == [int(v) for v in expected]


def test_match() -> None:
    x, out = values(2) & 3, np.zeros((3, 64), np.uint32)
    x[32:] = 7
    body = f"""
        {LOAD} match.any.sync.b32 %r10, %r8, -1; match.all.sync.b32 %r11|%p1, %r8, -1;
        selp.b32 %r12, 1, 0, %p1;
        add.s64 %d21, %d0, %d30; st.global.b32 [%d21], %r10; st.global.b32 [%d21+256], %r11;
        st.global.b32 [%d21+512], %r12;
    """
    execute(body, out, x, threads=64)
    for lane in range(64):
        warp = x[lane & 32 : (lane & 32) + 32]
        assert out[0, lane] == sum(1 << i for i in range(32) if warp[i] == x[lane])
    assert out[1].tolist() == [0] * 32 + [0xFFFFFFFF] * 32
    assert out[2].tolist() == [0] * 32 + [1] * 32


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_half_a_warp_shuffles_alone(schedule: str) -> None:
    """The other half never comes: the mask says that it need not."""
    x, out = values(3), np.zeros(64, np.uint32)
    body = f"""
        {LOAD} mov.b32 %r9, %r8; and.b32 %r1, %r0, 31; setp.ge.u32 %p1, %r1, 16; @%p1 bra DONE;
        shfl.sync.bfly.b32 %r9, %r8, 5, 31, 0xFFFF;
    DONE:
        {STORE}
    """
    outcome = execute(body, out, x, threads=64, schedule=schedule, seed=3)
    lane = np.arange(64)
    assert np.array_equal(out, np.where(lane % 32 < 16, x[lane ^ 5], x))
    assert outcome.hazards == []


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
@pytest.mark.parametrize("width", [8, 32])
def test_shuffle_modes(mode: str, width: int) -> None:
    x, out, valid = values(4, 32), np.zeros(32, np.uint32), np.zeros(32, np.uint32)
    segment, shift = 32 - width, 3
    control = segment << 8 | (0 if mode == "up" else 31)
    body = f"""
        {LOAD} shfl.sync.{mode}.b32 %r9|%p1, %r8, {shift}, {control}, -1; {STORE}
        selp.b32 %r10, 1, 0, %p1; add.s64 %d22, %d2, %d30; st.global.b32 [%d22], %r10;
    """
    execute(body, out, x, valid)
    for lane in range(32):
        start = lane // width * width
        source = {"up": lane - shift, "down": lane + shift, "bfly": lane ^ shift,
                  "idx": start + shift}[mode]  # fmt: skip
        inside = start <= source < start + width
        assert out[lane] == x[source if inside else lane]
        assert valid[lane] == inside


def test_shuffle_from_an_inactive_lane_is_reported() -> None:
    x, out = values(5, 32), np.zeros(32, np.uint32)
    body = f"""
        {LOAD} mov.b32 %r9, 0; setp.ge.u32 %p1, %r0, 16; @%p1 bra DONE;
        shfl.sync.bfly.b32 %r9, %r8, 16, 31, 0xFFFF;
    DONE:
        {STORE}
    """
    outcome = execute(body, out, x)
    assert len(outcome.hazards) == 1 and "inactive lane" in str(outcome.hazards[0])


def test_masks_that_do_not_fit_are_refused() -> None:
    out, x = np.zeros(32, np.uint32), values(6, 32)
    with pytest.raises(EmulationError, match="outside of its member mask"):
        execute(f"{LOAD} shfl.sync.bfly.b32 %r9, %r8, 1, 31, 0xFFFF; {STORE}", out, x)
    body = f"""
        {LOAD} setp.ge.u32 %p1, %r0, 16; @%p1 bra WAITS;
        shfl.sync.bfly.b32 %r9, %r8, 1, 31, 0x1FFFF; {STORE} bra DONE;
    WAITS:
        bar.warp.sync -1;
    DONE:
    """
    with pytest.raises(DeadlockError):
        execute(body, out, x)


def test_elect_and_activemask() -> None:
    out = np.zeros((2, 32), np.uint32)
    body = """
        mov.b32 %r9, 0; mov.b32 %r10, 0; setp.lt.u32 %p1, %r0, 5; @%p1 bra DONE;
        elect.sync %r1|%p2, 0xFFFFFFE0; selp.b32 %r9, 1, 0, %p2; activemask.b32 %r10;
    DONE:
        add.s64 %d21, %d0, %d30; st.global.b32 [%d21], %r9; st.global.b32 [%d21+128], %r10;
    """
    execute(body, out)
    assert out[0].tolist() == [int(lane == 5) for lane in range(32)]
    assert out[1].tolist() == [0] * 5 + [0xFFFFFFE0] * 27
