"""mbarrier and bar opcodes beyond waiting and arriving, on hand-written kernels."""

from __future__ import annotations

import numpy as np
import pytest

from hopperflash.emulator.errors import BarrierError, DeadlockError
from tests.support.ptx import execute

SCHEDULES = ["eager", "lazy", "random"]
STORE = "add.s64 %d20, %d0, %d30; st.global.b32 [%d20], %r9;"


def with_mbarrier(count: int, body: str) -> str:
    """Thread 0 initialises an mbarrier at %r3; %p2 is false in thread 0 alone."""
    return f"""
        mov.u32 %r3, smem; setp.ne.u32 %p2, %r0, 0; @%p2 bra READY;
        mbarrier.init.shared.b64 [%r3], {count};
    READY:
        bar.sync 0;
        {body}
    """


REDUCTIONS = {
    "popc.u32 %r9": lambda flags: flags.sum(),
    "and.pred %p5": lambda flags: flags.all(),
    "or.pred %p5": lambda flags: flags.any(),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("below", [0, 5, 96])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_bar_red(name: str, below: int, schedule: str) -> None:
    """Twice in a row, with the predicate and its negation."""
    out = np.zeros((2, 96), np.uint32)
    opcode, dst = name.split()
    convert = "" if opcode.startswith("popc") else "selp.b32 %r9, 1, 0, %p5;"
    body = f"""
        setp.lt.u32 %p4, %r0, {below};
        bar.red.{opcode} {dst}, 1, 96, %p4; {convert} {STORE}
        barrier.cta.red.{opcode.replace(".", ".aligned.")} {dst}, 1, 96, !%p4; {convert}
        st.global.b32 [%d20+384], %r9;
    """
    execute(body, out, threads=96, schedule=schedule, seed=5)
    flags = np.arange(96) < below
    assert (out[0] == REDUCTIONS[name](flags)).all()
    assert (out[1] == REDUCTIONS[name](~flags)).all()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_bar_red_from_different_places(schedule: str) -> None:
    """The last warp arrives by an instruction of its own, and counts as well."""
    out = np.zeros(96, np.uint32)
    body = f"""
        and.b32 %r4, %r0, 1; setp.ne.u32 %p4, %r4, 0; setp.ge.u32 %p1, %r0, 64; @%p1 bra LAST;
        bar.red.popc.u32 %r9, 1, 96, %p4; bra DONE;
    LAST:
        bar.red.popc.u32 %r9, 1, 96, %p1;
    DONE:
        {STORE}
    """
    execute(body, out, threads=96, schedule=schedule, seed=5)
    assert (out == 32 + 32).all()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_bar_arrive_does_not_wait(schedule: str) -> None:
    """Warp 0 hands a value to warp 1; it waits for nobody."""
    out = np.zeros(64, np.uint32)
    body = f"""
        mov.u32 %r3, smem; mov.b32 %r9, 5; setp.ge.u32 %p1, %r0, 32; @%p1 bra TAKES;
        st.shared.b32 [%r3], 42; bar.arrive 2, 64; bra DONE;
    TAKES:
        bar.sync 2, 64; ld.shared.b32 %r9, [%r3];
    DONE:
        {STORE}
    """
    outcome = execute(body, out, threads=64, schedule=schedule, seed=1)
    assert out.tolist() == [5] * 32 + [42] * 32
    assert outcome.hazards == []
    assert outcome.counters.barrier_waits == 1


def test_pending_count_of_a_state() -> None:
    out = np.zeros(32, np.uint32)
    body = with_mbarrier(40, f"""
        mbarrier.arrive.shared.b64 %d5, [%r3];
        mbarrier.pending_count.b64 %r9, %d5; {STORE}
    """)  # fmt: skip
    execute(body, out)
    assert sorted(out.tolist()) == list(range(9, 41))


def test_test_wait_takes_a_state_or_a_parity() -> None:
    out = np.zeros((3, 32), np.uint32)
    body = with_mbarrier(32, """
        mbarrier.arrive.noComplete.shared.b64 %d5, [%r3], 1; bar.sync 0;
        mbarrier.test_wait.shared.b64 %p3, [%r3], %d5; selp.b32 %r9, 1, 0, %p3;
        mbarrier.test_wait.parity.shared.b64 %p3, [%r3], 1; selp.b32 %r10, 1, 0, %p3;
        mbarrier.test_wait.parity.shared.b64 %p3, [%r3], 0; selp.b32 %r11, 1, 0, %p3;
        add.s64 %d20, %d0, %d30; st.global.b32 [%d20], %r9; st.global.b32 [%d20+128], %r10;
        st.global.b32 [%d20+256], %r11;
    """)  # fmt: skip
    execute(body, out)
    assert out.tolist() == [[1] * 32, [0] * 32, [1] * 32]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_transactions_complete_a_phase(schedule: str) -> None:
    """A phase waits for its bytes; expect and complete may come from different threads."""
    out = np.zeros(32, np.uint32)
    body = with_mbarrier(1, f"""
        @!%p2 mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r3], 64;
        @!%p2 mbarrier.arrive.shared.b64 _, [%r3];
        mbarrier.test_wait.parity.shared.b64 %p3, [%r3], 0; selp.b32 %r9, 10, 0, %p3; bar.sync 0;
        @!%p2 mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r3], 64; bar.sync 0;
        mbarrier.try_wait.parity.shared.b64 %p3, [%r3], 0; selp.b32 %r10, 1, 0, %p3;
        add.s32 %r9, %r9, %r10; {STORE}
    """)  # fmt: skip
    execute(body, out, schedule=schedule)
    assert (out == 1).all()


def test_dropped_threads_are_not_expected_again() -> None:
    out = np.zeros(32, np.uint32)
    body = with_mbarrier(32, f"""
        setp.lt.u32 %p4, %r0, 30;
        @%p4 mbarrier.arrive_drop.shared.b64 _, [%r3];
        @!%p4 mbarrier.arrive.shared.b64 _, [%r3]; bar.sync 0;
        @!%p4 mbarrier.arrive.shared.b64 _, [%r3]; bar.sync 0;
        mbarrier.test_wait.parity.shared.b64 %p3, [%r3], 1; selp.b32 %r9, 1, 0, %p3; {STORE}
    """)  # fmt: skip
    execute(body, out)
    assert (out == 1).all()


def test_an_invalidated_mbarrier_is_gone() -> None:
    body = with_mbarrier(1, "@!%p2 mbarrier.inval.shared.b64 [%r3]; bar.sync 0; ")
    again = "@!%p2 mbarrier.init.shared.b64 [%r3], 2;"
    assert execute(body + again, np.zeros(1, np.uint32)).hazards == []
    with pytest.raises(BarrierError, match="not initialised"):
        execute(body + "mbarrier.arrive.shared.b64 _, [%r3];", np.zeros(1, np.uint32))


def test_a_phase_that_never_completes_is_a_deadlock() -> None:
    body = with_mbarrier(2, """
        @!%p2 mbarrier.arrive.shared.b64 _, [%r3];
    LOOP:
        mbarrier.try_wait.parity.shared.b64 %p3, [%r3], 0; @!%p3 bra LOOP;
    """)  # fmt: skip
    with pytest.raises(DeadlockError, match="pending 1 of 2"):
        execute(body, np.zeros(1, np.uint32))


def test_a_cluster_barrier_is_waited_for_once_an_arrival() -> None:
    arrive, wait = "barrier.cluster.arrive.aligned; ", "barrier.cluster.wait.aligned; "
    out = np.zeros(1, np.uint32)
    assert execute(2 * (arrive + wait), out, grid=2, cluster=2).hazards == []
    with pytest.raises(BarrierError, match="have not arrived"):
        execute(arrive + wait + wait, out, grid=2, cluster=2)
