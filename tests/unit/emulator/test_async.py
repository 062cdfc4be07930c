"""Asynchronous work on hand-written kernels: schedules, groups, and what a missing wait shows."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.ptx import Outcome, execute

SCHEDULES = ["eager", "lazy", "random"]

INIT = """
    mov.u32 %r3, smem; elect.sync %r1|%p1, -1; @!%p1 bra READY;
    mbarrier.init.shared.b64 [%r3], 1; fence.mbarrier_init.release.cluster;
READY:
    bar.sync 0;
"""
LOAD = """
    @!%p1 bra ISSUED;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r3], 128;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r3+1024], [%d1], 128, [%r3];
ISSUED:
"""
WAIT = """
LOOP:
    mbarrier.try_wait.parity.shared.b64 %p3, [%r3], 0; @!%p3 bra LOOP;
"""
READ = """
    shl.b32 %r5, %r0, 2; add.s32 %r5, %r5, %r3; ld.shared.b32 %r9, [%r5+1024];
    add.s64 %d20, %d0, %d30; st.global.b32 [%d20], %r9;
"""


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_bulk_load(schedule: str) -> None:
    source, out = np.arange(32, dtype=np.uint32), np.zeros(32, np.uint32)
    outcome = execute(INIT + LOAD + WAIT + READ, out, source, schedule=schedule, seed=2)
    assert np.array_equal(out, source)
    assert outcome.counters.tma_load_bytes == 128
    assert outcome.hazards == []


def test_a_missing_wait_shows_in_the_lazy_schedule() -> None:
    source, out = np.arange(32, dtype=np.uint32), np.zeros(32, np.uint32)
    execute(INIT + LOAD + READ, out, source, schedule="eager")
    assert np.array_equal(out, source)
    execute(INIT + LOAD + READ, out, source, schedule="lazy")
    assert (out == 0xFFFFFFFF).all()


def test_random_schedules_repeat_by_seed() -> None:
    source, out = np.arange(32, dtype=np.uint32), np.zeros(32, np.uint32)
    results = set()
    for seed in (*range(8), *range(8)):
        execute(INIT + LOAD + READ, out, source, schedule="random", seed=seed)
        results.add((seed, out.tobytes()))
    assert len(results) == 8
    assert len({data for _, data in results}) == 2


FILL = """
    mov.u32 %r3, smem; shl.b32 %r5, %r0, 2; add.s32 %r5, %r5, %r3;
    st.shared.b32 [%r5], %r0;
"""
FENCE = "fence.proxy.async.shared::cta;\n"
BARRIER = "bar.sync 0;\n"
STORE = """
    setp.ge.u32 %p1, %r0, 32; @%p1 bra LATER;
    elect.sync %r1|%p1, -1; @!%p1 bra LATER;
    cp.async.bulk.global.shared::cta.bulk_group [%d0], [%r3], 256;
    cp.async.bulk.commit_group;
"""
DRAIN = "cp.async.bulk.wait_group.read 0;\n"
AFTER = "LATER:\n"


def _store(body: str, schedule: str = "lazy") -> tuple[NDArray[np.uint32], Outcome]:
    out = np.zeros(64, np.uint32)
    outcome = execute(body, out, threads=64, schedule=schedule)
    return out, outcome


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_bulk_store(schedule: str) -> None:
    out, outcome = _store(FILL + FENCE + BARRIER + STORE + DRAIN + AFTER, schedule)
    assert np.array_equal(out, np.arange(64))
    assert outcome.hazards == []
    assert outcome.counters.tma_store_bytes == 256


@pytest.mark.parametrize(
    ("body", "report"),
    [
        (FILL + BARRIER + STORE + DRAIN + AFTER, "missing fence.proxy.async"),
        (FILL + FENCE + STORE + DRAIN + AFTER, "with no synchronisation after its write"),
        (FILL + FENCE + BARRIER + STORE + AFTER, "bulk store never waited for"),
        (FILL + FENCE + BARRIER + STORE + "st.shared.b32 [%r3], 7;" + DRAIN + AFTER,
         "while a bulk store still reads it"),
    ],
)  # fmt: skip
def test_faults_around_a_bulk_store_are_reported(body: str, report: str) -> None:
    _, outcome = _store(body)
    assert len(outcome.hazards) == 1
    assert report in outcome.hazards[0]
    assert "PTX line" in outcome.hazards[0]


def test_early_overwrite_changes_the_bytes_in_the_lazy_schedule() -> None:
    body = FILL + FENCE + BARRIER + STORE + "st.shared.b32 [%r3], 7;" + DRAIN + AFTER
    assert _store(body, "lazy")[0][0] == 7
    assert _store(body, "eager")[0][0] == 0


def test_stores_land_at_the_full_wait_or_the_end() -> None:
    body = FILL + FENCE + BARRIER + STORE + "{wait} ld.global.b32 %r9, [%d0+4];" + """
        st.global.b32 [%d1], %r9;
    """ + AFTER  # fmt: skip
    for wait, seen in (
        ("cp.async.bulk.wait_group.read 0;", 99),
        ("cp.async.bulk.wait_group 0;", 1),
    ):
        out, probe = np.full(64, 99, np.uint32), np.zeros(1, np.uint32)
        execute(body.replace("{wait}", wait), out, probe, threads=64, schedule="lazy")
        assert probe[0] == seen
        assert np.array_equal(out, np.arange(64))


def test_bulk_reduction_adds() -> None:
    out = np.ones(32, np.float32)
    body = """
        mov.u32 %r3, smem; shl.b32 %r5, %r0, 2; add.s32 %r5, %r5, %r3; cvt.rn.f32.u32 %r6, %r0;
        st.shared.b32 [%r5], %r6; fence.proxy.async.shared::cta; bar.sync 0;
        elect.sync %r1|%p1, -1; @!%p1 bra LATER;
        cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%d0], [%r3], 128;
        cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0;
    LATER:
    """
    execute(body, out, schedule="lazy")
    assert np.array_equal(out, np.arange(32) + 1)


def test_cp_async_groups_and_zero_fill() -> None:
    source = np.arange(64, dtype=np.uint32)
    body = """
        mov.u32 %r3, smem; shl.b32 %r5, %r0, 4; add.s32 %r5, %r5, %r3;
        mul.wide.u32 %d5, %r0, 8; add.s64 %d6, %d1, %d5;
        cp.async.ca.shared.global [%r5], [%d6], 8, 8; cp.async.commit_group;
        cp.async.ca.shared.global [%r5+8], [%d6], 8, 4; cp.async.commit_group;
        cp.async.wait_group WAIT;
        mul.wide.u32 %d7, %r0, 16; add.s64 %d8, %d0, %d7;
        ld.shared.v4.b32 {%r10, %r11, %r12, %r13}, [%r5];
        st.global.v4.b32 [%d8], {%r10, %r11, %r12, %r13};
    """
    out = np.zeros((32, 4), np.uint32)
    pairs = source.reshape(32, 2)
    execute(body.replace("WAIT", "0"), out, source, schedule="lazy")
    assert np.array_equal(out[:, :2], pairs)
    assert np.array_equal(out[:, 2], pairs[:, 0])
    assert (out[:, 3] == 0).all()
    execute(body.replace("WAIT", "1"), out, source, schedule="lazy")
    assert np.array_equal(out[:, :2], pairs)
    assert (out[:, 2:] == 0xFFFFFFFF).all()


D_LIST = ", ".join(f"%r{100 + i}" for i in range(4))
MATRIX = """
    mov.u32 %r3, smem; mov.b32 %r6, 1006648320;
    shl.b32 %r5, %r0, 2; add.s32 %r5, %r5, %r3;
    st.shared.b32 [%r5], %r6; st.shared.b32 [%r5+512], %r6; st.shared.b32 [%r5+1024], %r6;
    st.shared.b32 [%r5+1536], %r6; st.shared.b32 [%r5+2048], %r6;
    fence.proxy.async.shared::cta; bar.sync 0;
    shr.u32 %r7, %r3, 4; cvt.u64.u32 %d5, %r7; or.b64 %d6, %d5, 68720001024;
    mov.b64 %d7, 0; setp.ne.s32 %p5, %r3, 0;
    mov.b32 %r100, 0; mov.b32 %r101, 0; mov.b32 %r102, 0; mov.b32 %r103, 0;
    wgmma.fence.sync.aligned;
"""
WGMMA = f"""
    wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {{{D_LIST}}}, %d6, %d6, %p5, 1, 1, 0, 0;
    wgmma.commit_group.sync.aligned;
"""
WGMMA_WAIT = "wgmma.wait_group.sync.aligned 0;\n"
RESULT = """
    mov.b32 %r9, %r103; add.s64 %d20, %d0, %d30; st.global.b32 [%d20], %r9;
"""


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_wgmma_of_ones(schedule: str) -> None:
    out = np.zeros(128, np.float32)
    outcome = execute(MATRIX + WGMMA + WGMMA + WGMMA_WAIT + RESULT, out, threads=128,
                      schedule=schedule)  # fmt: skip
    assert (out == 32).all()
    assert outcome.hazards == []
    assert outcome.counters.wgmma == 2
    assert outcome.counters.wgmma_flops == 2 * 2 * 64 * 8 * 16


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_accumulators_touched_in_flight_are_reported(schedule: str) -> None:
    out = np.zeros(128, np.float32)
    outcome = execute(MATRIX + WGMMA + RESULT, out, threads=128, schedule=schedule)
    assert any("accumulator touched" in h and "%r103" in h for h in outcome.hazards)
    assert any("wgmma never waited for" in h for h in outcome.hazards)
    if schedule == "lazy":
        assert (out == 0).all()


def test_operands_of_a_queued_wgmma_must_stay() -> None:
    out = np.zeros(128, np.float32)
    overwrite = "mov.b32 %r6, 0; st.shared.b32 [%r5], %r6;\n"
    outcome = execute(MATRIX + WGMMA + overwrite + WGMMA_WAIT + RESULT, out, threads=128,
                      schedule="lazy")  # fmt: skip
    assert (out != 16).any()
    assert any("while a wgmma still reads it" in h for h in outcome.hazards)


CLUSTER = """
    mov.u32 %r3, smem; elect.sync %r1|%p1, -1; @!%p1 bra READY;
    mbarrier.init.shared.b64 [%r3], 1; fence.mbarrier_init.release.cluster;
READY:
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    mov.u32 %r2, %cluster_ctarank;
"""


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_remote_arrival_and_store(schedule: str) -> None:
    out = np.zeros(2, np.uint32)
    body = (
        CLUSTER
        + """
        xor.b32 %r4, %r2, 1; mapa.shared::cluster.u32 %r5, %r3, %r4;
        @!%p1 bra WAITS;
        add.s32 %r7, %r2, 50; st.shared::cluster.b32 [%r5+64], %r7;
        mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r5];
    WAITS:
        mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p3, [%r3], 0; @!%p3 bra WAITS;
        ld.shared.b32 %r9, [%r3+64]; mul.wide.u32 %d5, %r2, 4; add.s64 %d6, %d0, %d5;
        st.global.b32 [%d6], %r9;
    """
    )
    execute(body, out, grid=2, cluster=2, schedule=schedule, seed=4)
    assert out.tolist() == [51, 50]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_multicast_reaches_every_cta(schedule: str) -> None:
    source, out = np.arange(32, dtype=np.uint32), np.zeros((2, 32), np.uint32)
    body = (
        CLUSTER
        + """
        @!%p1 bra WAITS;
        mbarrier.arrive.expect_tx.shared.b64 _, [%r3], 128;
        setp.ne.u32 %p4, %r2, 0; @%p4 bra WAITS; mov.b16 %h1, 3;
        cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster
            [%r3+1024], [%d1], 128, [%r3], %h1;
    WAITS:
        mbarrier.try_wait.parity.shared.b64 %p3, [%r3], 0; @!%p3 bra WAITS;
        mul.wide.u32 %d5, %r2, 128; add.s64 %d0, %d0, %d5;
    """
        + READ
    )
    execute(body, out, source, grid=2, cluster=2, schedule=schedule, seed=4)
    assert np.array_equal(out, [source, source])
