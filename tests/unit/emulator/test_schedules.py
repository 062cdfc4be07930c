"""What the schedules draw: order of CTAs and warps, skew, completion times; divergence."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.ptx import Outcome, execute

SEEDS = range(24)


def _random(body: str, *arrays: NDArray[np.generic], seed: int, **options: int) -> Outcome:
    return execute(body, *arrays, schedule="random", seed=seed, **options)


def test_ctas_start_in_any_order_and_several_at_once() -> None:
    # Every CTA takes a ticket on entry and another on exit.
    body = """
        mov.u32 %r2, %ctaid.x; setp.ne.u32 %p1, %r0, 0; @%p1 ret;
        atom.global.add.u32 %r9, [%d1], 1; mul.wide.u32 %d5, %r2, 8; add.s64 %d6, %d0, %d5;
        st.global.b32 [%d6], %r9; nanosleep.u32 9; nanosleep.u32 9; nanosleep.u32 9;
        nanosleep.u32 9; nanosleep.u32 9; nanosleep.u32 9;
        atom.global.add.u32 %r9, [%d1], 1; st.global.b32 [%d6+4], %r9;
    """
    orders, overlap = set(), set()
    for seed in SEEDS:
        out, ticket = np.zeros((4, 2), np.uint32), np.zeros(1, np.uint32)
        _random(body, out, ticket, seed=seed, grid=4)
        assert sorted(out.reshape(-1).tolist()) == list(range(8))
        orders.add(tuple(np.argsort(out[:, 0]).tolist()))
        overlap.add(bool((np.diff(out, axis=1) > 1).any()))
    assert len(orders) > 6
    assert overlap == {True, False}


def test_cross_cta_sums_round_differently_between_seeds() -> None:
    body = """
        mov.u32 %r2, %ctaid.x; setp.ne.u32 %p1, %r0, 0; @%p1 ret;
        cvt.rn.f32.u32 %r4, %r2; mul.f32 %r4, %r4, 0f3F9D70A4; red.global.add.f32 [%d0], %r4;
    """
    sums = set()
    for seed in (*SEEDS, *SEEDS):
        out = np.zeros(1, np.float32)
        _random(body, out, seed=seed, grid=16)
        sums.add((seed, out.tobytes()))
    assert len(sums) == len(SEEDS), "the same seed gives the same run"
    assert len({total for _, total in sums}) > 2


# The writer has ten times as far to go as the reader.
RACE = """
    mov.u32 %r3, smem; shr.u32 %r4, %r0, 5; and.b32 %r5, %r0, 31; shl.b32 %r5, %r5, 2;
    add.s32 %r5, %r5, %r3; setp.eq.u32 %p1, %r4, 0; mov.b32 %r1, 0; selp.b32 %r2, 60, 6, %p1;
WORK:
    add.s32 %r1, %r1, 1; setp.lt.u32 %p2, %r1, %r2; @%p2 bra WORK;
    @!%p1 bra READER;
    st.shared.b32 [%r5], 1; bra.uni DONE;
READER:
    ld.shared.b32 %r9, [%r5]; add.s64 %d20, %d0, %d30; st.global.b32 [%d20], %r9;
DONE:
"""


def test_a_warp_may_run_far_ahead_or_fall_behind() -> None:
    seen = []
    for seed in SEEDS:
        out = np.zeros(64, np.uint32)
        outcome = _random(RACE, out, seed=seed, threads=64)
        seen.append(int(out[32]))
        assert outcome.hazards
    assert seen.count(1) > 3
    assert seen.count(0xFFFFFFFF) > 3


COPY = """
    mov.u32 %r3, smem; mov.b32 %r4, 0;
    setp.ne.u32 %p1, %r0, 0; @%p1 ret;
    mbarrier.init.shared.b64 [%r3], 1; fence.mbarrier_init.release.cluster;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r3], 512;
    cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r3+1024], [%d1], 256, [%r3];
    cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r3+2048], [%d1], 256, [%r3];
LOOP:
    ld.shared.b32 %r9, [%r3+1024]; ld.shared.b32 %r8, [%r3+2048];
    setp.eq.u32 %p2, %r9, 0; selp.b32 %r9, 1, 0, %p2; setp.eq.u32 %p2, %r8, 0;
    selp.b32 %r8, 2, 0, %p2; add.s32 %r9, %r9, %r8; max.u32 %r4, %r4, %r9;
    setp.eq.u32 %p3, %r9, 0; @%p3 bra LOOP;
    st.global.b32 [%d0], %r9;
    mbarrier.try_wait.parity.shared.b64 %p4, [%r3], 0;
"""


def test_loads_land_in_any_order() -> None:
    first = set()
    for seed in SEEDS:
        out, source = np.zeros(1, np.uint32), np.zeros(64, np.uint32)
        _random(COPY, out, source, seed=seed)
        first.add(int(out[0]))
    assert {1, 2} <= first


STORED = """
    mov.u32 %r3, smem; st.shared.b32 [%r3], 1; st.shared.b32 [%r3+4], 1; st.shared.b32 [%r3+8], 1;
    st.shared.b32 [%r3+12], 1; fence.proxy.async.shared::cta;
    cp.async.bulk.global.shared::cta.bulk_group [%d0], [%r3], 16; cp.async.bulk.commit_group;
    st.shared.b32 [%r3], 2; nanosleep.u32 10; nanosleep.u32 10; nanosleep.u32 10;
    ld.volatile.global.b32 %r9, [%d0];
    cp.async.bulk.wait_group 0; st.global.b32 [%d1], %r9;
"""


def test_stores_read_and_write_at_any_time() -> None:
    seen = set()
    for seed in range(60):
        out, probe = np.zeros(4, np.uint32), np.zeros(1, np.uint32)
        _random(STORED, out, probe, seed=seed, threads=1)
        seen.add((int(out[0]), int(probe[0])))
    # Read before the overwrite or after it; written before the probe or after it.
    assert seen == {(1, 0), (1, 1), (2, 0), (2, 2)}


@pytest.mark.parametrize("schedule", ["eager", "lazy", "random"])
def test_nested_divergence_reconverges(schedule: str) -> None:
    out = np.zeros(64, np.uint32)
    body = """
        mov.b32 %r9, 0; mov.b32 %r2, 0; and.b32 %r1, %r0, 7;
    OUTER:
        setp.ge.u32 %p1, %r2, %r1; @%p1 bra AFTER;
        and.b32 %r3, %r2, 1; setp.eq.u32 %p2, %r3, 0; @%p2 bra EVEN;
        add.s32 %r9, %r9, 100; bra.uni NEXT;
    EVEN:
        add.s32 %r9, %r9, 1;
    NEXT:
        add.s32 %r2, %r2, 1; bra.uni OUTER;
    AFTER:
        activemask.b32 %r4; popc.b32 %r4, %r4;
        shfl.sync.idx.b32 %r5, %r9, 7, 31, -1;
        mad.lo.s32 %r9, %r5, 1000, %r9;
        add.s64 %d20, %d0, %d30; st.global.b32 [%d20], %r9;
    """
    execute(body, out, threads=64, schedule=schedule, seed=5)
    trips = np.arange(64) & 7
    own = (trips + 1) // 2 + trips // 2 * 100
    assert np.array_equal(out, own[7] * 1000 + own)


@pytest.mark.parametrize("schedule", ["eager", "lazy", "random"])
def test_lanes_of_a_warp_leave_a_spin_loop_one_by_one(schedule: str) -> None:
    # Lane i waits for lane i - 1 of its warp: only independent threads get through.
    out = np.zeros(32, np.uint32)
    body = """
        mov.u32 %r3, smem; shl.b32 %r5, %r0, 2; add.s32 %r5, %r5, %r3;
        st.volatile.shared.b32 [%r5], 0;
        bar.warp.sync -1; setp.eq.u32 %p1, %r0, 0; @%p1 bra GO;
    SPIN:
        ld.volatile.shared.b32 %r9, [%r5+-4]; setp.eq.u32 %p2, %r9, 0; @%p2 bra SPIN;
    GO:
        add.s32 %r8, %r0, 1; st.volatile.shared.b32 [%r5], %r8;
        add.s64 %d20, %d0, %d30; st.global.b32 [%d20], %r8;
    """
    execute(body, out, schedule=schedule, seed=3)
    assert np.array_equal(out, np.arange(32) + 1)


@pytest.mark.parametrize("schedule", ["eager", "lazy", "random"])
def test_collectives_leave_the_warps_between_theirs_alone(schedule: str) -> None:
    """Warps 0 and 2 multiply and move matrices while 1 and 3, whose addresses are odd, do not."""
    body = """
        mov.u32 %r3, smem; shr.u32 %r4, %r0, 5; and.b32 %r5, %r4, 1; setp.ne.u32 %p1, %r5, 0;
        and.b32 %r6, %r0, 31; shl.b32 %r6, %r6, 4; shl.b32 %r7, %r4, 9; add.s32 %r6, %r6, %r7;
        add.s32 %r6, %r6, %r3; add.s32 %r6, %r6, %r5;
        mov.b32 %r10, 0; mov.b32 %r11, 0; mov.b32 %r12, 0; mov.b32 %r13, 0; mov.b32 %r30, 7;
        mov.b32 %r20, 0x3F803F80; mov.b32 %r14, 0;
        @%p1 bra DONE;
        stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r6], {%r20};
        ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r30}, [%r6];
        mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%r10, %r11, %r12, %r13},
            {%r30, %r30, %r30, %r30}, {%r30, %r30}, {%r10, %r11, %r12, %r13};
    DONE:
        add.s64 %d20, %d0, %d30; st.global.b32 [%d20], %r10;
        add.s64 %d20, %d1, %d30; st.global.b32 [%d20], %r30;
    """
    for seed in SEEDS[:8]:
        sums, loaded = np.zeros(128, np.float32), np.zeros(128, np.uint32)
        outcome = execute(body, sums, loaded, threads=128, schedule=schedule, seed=seed)
        assert sums.reshape(4, 32).tolist() == [[16.0] * 32, [0.0] * 32] * 2
        assert loaded.reshape(4, 32).tolist() == [[0x3F803F80] * 32, [7] * 32] * 2
        assert outcome.counters.mma == 2
        assert outcome.hazards == []
