"""Work across the CTAs of a cluster, on hand-written kernels."""

from __future__ import annotations

import numpy as np
import pytest

from hopperflash.emulator.errors import AddressError
from tests.support.ptx import execute

SCHEDULES = ["eager", "lazy", "random"]
SIZE = 4

# Two mbarriers at %r3 and %r3+8 with one expected arrival; %p2 is false in thread 0 alone; %r2 is
# the rank, %r4 the next rank and %r5 the start of its shared memory.
SETUP = f"""
    mov.u32 %r3, smem; setp.ne.u32 %p2, %r0, 0; @%p2 bra READY;
    mbarrier.init.shared.b64 [%r3], 1; mbarrier.init.shared.b64 [%r3+8], 1;
    fence.mbarrier_init.release.cluster;
READY:
    mov.u32 %r2, %cluster_ctarank; add.u32 %r4, %r2, 1; rem.u32 %r4, %r4, {SIZE};
    mapa.shared::cluster.u32 %r5, %r3, %r4;
    barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;
"""
EXPECT = "@!%p2 mbarrier.arrive.expect_tx.shared.b64 _, [%r3], {};"
WAIT = """
LOOP:
    mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p3, [%r3], 0; @!%p3 bra LOOP;
"""
SYNC = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
STORE = """
    mad.lo.u32 %r7, %r2, 32, %r0; mul.wide.u32 %d5, %r7, 4; add.s64 %d6, %d0, %d5;
    st.global.b32 [%d6], %r9;
"""


def run(body: str, *arrays: np.ndarray, schedule: str = "eager") -> np.ndarray:
    out = np.zeros((SIZE, 32), np.uint32)
    outcome = execute(
        SETUP + body + SYNC, out, *arrays, grid=SIZE, cluster=SIZE, schedule=schedule, seed=6
    )
    assert outcome.hazards == []
    return out


LANE = np.arange(32)
RANK = np.arange(SIZE)[:, None]
PREVIOUS = (RANK - 1) % SIZE


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_distributed_loads_stores_and_atomics(schedule: str) -> None:
    body = f"""
        mad.lo.u32 %r8, %r2, 100, %r0; shl.b32 %r6, %r0, 2; add.s32 %r10, %r5, %r6;
        st.shared::cluster.b32 [%r10+64], %r8; {SYNC}
        add.s32 %r11, %r3, %r6; ld.shared.b32 %r9, [%r11+64]; {SYNC}
        atom.relaxed.cluster.shared::cluster.add.u32 %r12, [%r10+64], 1000; {SYNC}
        ld.shared::cluster.b32 %r13, [%r10+64]; add.u32 %r9, %r9, %r12; sub.u32 %r9, %r9, %r13;
        add.u32 %r9, %r9, 1000;
        {STORE}
    """
    out = run(body, schedule=schedule)
    assert np.array_equal(out, PREVIOUS * 100 + LANE)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_lanes_reach_different_ctas(schedule: str) -> None:
    """Each lane writes into the CTA of its number: a transposition over the cluster."""
    body = f"""
        and.b32 %r4, %r0, 3; mapa.shared::cluster.u32 %r5, %r3, %r4; shr.u32 %r6, %r0, 2;
        mad.lo.u32 %r6, %r2, 8, %r6; shl.b32 %r6, %r6, 2; add.s32 %r5, %r5, %r6;
        mad.lo.u32 %r8, %r2, 100, %r0; st.shared::cluster.b32 [%r5+64], %r8; {SYNC}
        shl.b32 %r6, %r0, 2; add.s32 %r11, %r3, %r6; ld.shared.b32 %r9, [%r11+64]; {STORE}
    """
    out = run(body, schedule=schedule)
    assert np.array_equal(out, LANE // 8 * 100 + LANE % 8 * 4 + RANK)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_asynchronous_stores(schedule: str) -> None:
    body = f"""
        {EXPECT.format(32 * 16)}
        mad.lo.u32 %r8, %r2, 100, %r0; mul.lo.u32 %r6, %r0, 16; add.s32 %r10, %r5, %r6;
        st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32
            [%r10+64], {{%r8, %r8, %r0, %r8}}, [%r5];
        {WAIT} add.s32 %r11, %r3, %r6; ld.shared.b32 %r9, [%r11+76]; {STORE}
    """
    assert np.array_equal(run(body, schedule=schedule), PREVIOUS * 100 + LANE)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_asynchronous_reductions(schedule: str) -> None:
    """Every lane of every CTA adds to one word of the next CTA."""
    body = f"""
        @!%p2 st.shared.b32 [%r3+64], 7; {SYNC} {EXPECT.format(32 * 4)}
        red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32
            [%r5+64], %r0, [%r5];
        {WAIT} ld.shared.b32 %r9, [%r3+64]; {STORE}
    """
    assert (run(body, schedule=schedule) == 7 + LANE.sum()).all()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_bulk_copies_between_ctas(schedule: str) -> None:
    body = f"""
        {EXPECT.format(128)}
        mad.lo.u32 %r8, %r2, 100, %r0; shl.b32 %r6, %r0, 2; add.s32 %r10, %r3, %r6;
        st.shared.b32 [%r10+1024], %r8; fence.proxy.async.shared::cta; bar.sync 0;
        @!%p2 cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes
            [%r5+2048], [%r3+1024], 128, [%r5];
        {WAIT} ld.shared.b32 %r9, [%r10+2048]; {STORE}
    """
    assert np.array_equal(run(body, schedule=schedule), PREVIOUS * 100 + LANE)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("op", ["add.u32", "max.s32", "xor.b32"])
def test_bulk_reductions_between_ctas(op: str, schedule: str) -> None:
    body = f"""
        {EXPECT.format(128)}
        mad.lo.u32 %r8, %r2, 100, %r0; shl.b32 %r6, %r0, 2; add.s32 %r10, %r3, %r6;
        st.shared.b32 [%r10+1024], %r8; st.shared.b32 [%r10+2048], 205;
        fence.proxy.async.shared::cta; {SYNC}
        @!%p2 cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.{op}
            [%r5+2048], [%r3+1024], 128, [%r5];
        {WAIT} ld.shared.b32 %r9, [%r10+2048]; {STORE}
    """
    fn = {"add.u32": np.add, "max.s32": np.maximum, "xor.b32": np.bitwise_xor}[op]
    assert np.array_equal(run(body, schedule=schedule), fn(PREVIOUS * 100 + LANE, 205))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_cta_arrives_at_the_first(schedule: str) -> None:
    body = f"""
        mapa.shared::cluster.u32 %r5, %r3, 0; setp.ne.u32 %p4, %r2, 0; mov.b32 %r9, 3;
        @!%p2 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r5+16];
        @%p4 bra DONE;
    LOOP:
        mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p3, [%r3+16], 0; @!%p3 bra LOOP;
        mov.b32 %r9, 4;
    DONE:
        {STORE}
    """
    init = f"@!%p2 mbarrier.init.shared.b64 [%r3+16], {SIZE}; fence.mbarrier_init.release.cluster;"
    out = run(f"{init} {SYNC} {body}", schedule=schedule)
    assert out.tolist() == [[4] * 32] + [[3] * 32] * (SIZE - 1)


def test_ranks_of_addresses_and_ctas() -> None:
    body = f"""
        getctarank.shared::cluster.u32 %r8, %r5; getctarank.shared::cluster.u32 %r9, %r3;
        mov.u32 %r10, %cluster_nctarank; mov.u32 %r11, %clusterid.x; mov.u32 %r12, %cluster_ctaid.x;
        mad.lo.u32 %r9, %r9, 10, %r8; mad.lo.u32 %r9, %r10, 100, %r9;
        mad.lo.u32 %r9, %r11, 1000, %r9; mad.lo.u32 %r9, %r12, 10000, %r9; {STORE}
    """
    expected = RANK * 10000 + SIZE * 100 + RANK * 10 + (RANK + 1) % SIZE
    assert np.array_equal(run(body), np.broadcast_to(expected, (SIZE, 32)))


def test_a_rank_that_is_not_there_is_refused() -> None:
    with pytest.raises(AddressError, match="CTA 9"):
        run("mapa.shared::cluster.u32 %r5, %r3, 9; ld.shared::cluster.b32 %r9, [%r5];")
