"""Clocks, and instructions that change no result: hints, fences, waits for other grids."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.ptx import execute

SCHEDULES = ["eager", "lazy", "random"]

HINTS = (
    "griddepcontrol.wait; griddepcontrol.launch_dependents;",
    "nanosleep.u32 100;",
    "prefetch.global.L1 [%d1]; prefetch.global.L2 [%d1]; prefetchu.L1 [%d1];",
    "prefetch.global.L2::evict_last [%d1]; applypriority.global.L2::evict_normal [%d1], 128;",
    "createpolicy.fractional.L2::evict_first.b64 %d9, 0f3F800000;",
    "cp.async.bulk.prefetch.L2.global [%d1], 128;",
    "fence.proxy.async; fence.proxy.async.shared::cta; fence.acq_rel.gpu; membar.cta;",
    "fence.mbarrier_init.release.cluster; pmevent 1;",
)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("hint", HINTS, ids=[h.split(";")[0].split()[0] for h in HINTS])
def test_hints_change_nothing(hint: str, schedule: str) -> None:
    source = np.arange(64, dtype=np.uint32)
    out = np.zeros_like(source)
    body = f"""
        add.s64 %d5, %d1, %d30; add.s64 %d6, %d0, %d30; ld.global.b32 %r1, [%d5];
        mul.lo.u32 %r1, %r1, 3; {hint} add.s32 %r1, %r1, 1; st.global.b32 [%d6], %r1;
    """
    outcome = execute(body, out, source, threads=64, schedule=schedule)
    assert np.array_equal(out, 3 * source + 1)
    assert outcome.hazards == []


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("bits", "name"),
    [(32, "clock"), (32, "clock_hi"), (64, "clock64"), (64, "globaltimer"), (32, "globaltimer_lo")],
)
def test_clocks_never_run_backwards(name: str, bits: int, schedule: str) -> None:
    """Each reading of a thread is later than the one before, also around a loop."""
    readings = np.zeros((4, 32), f"u{bits // 8}")
    r, lanes = ("%r", "%d30") if bits == 32 else ("%d", "%d31")
    body = f"""
        add.s64 %d6, %d0, {lanes}; mov.b32 %r9, 0;
    AGAIN:
        mov.u{bits} {r}10, %{name}; st.global.b{bits} [%d6], {r}10; nanosleep.u32 20;
        add.s64 %d6, %d6, {4 * bits}; add.s32 %r9, %r9, 1;
        setp.lt.u32 %p1, %r9, 4; @%p1 bra AGAIN;
    """
    execute(body, readings, schedule=schedule)
    steps = np.diff(readings.astype(np.int64), axis=0)
    assert (steps == 0).all() if name == "clock_hi" else (steps > 0).all()
