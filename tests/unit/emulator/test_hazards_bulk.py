"""Hazards of bulk copies, cp.async and mbarriers: racy kernels and their clean twins."""

from __future__ import annotations

import numpy as np
import pytest

from hopperflash.emulator.errors import AddressError, BarrierError, DeadlockError
from tests.support.hazards import RUNS, check_twins, hazards_of

SETUP = "mov.u32 %r3, smem; elect.sync %r1|%p1, -1; setp.lt.u32 %p2, %r0, 32;\n"
ELECT = "and.pred %p1, %p1, %p2;\n"
INIT_BARRIER = "@%p1 mbarrier.init.shared.b64 [%r3], 1;\n"
INIT_FENCE = "@%p1 fence.mbarrier_init.release.cluster;\n"
SYNC = "bar.sync 0;\n"
INIT = SETUP + ELECT + INIT_BARRIER + INIT_FENCE + SYNC
EXPECT = "@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r3], 256;\n"
COPY = """
    @%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes
        [%r3+1024], [%d1], 256, [%r3];
"""
LOAD = EXPECT + COPY
SECOND_LOAD = LOAD.replace("[%d1]", "[%d1+256]")
# Each use needs labels of its own.
WAIT = "{{ .reg .pred q; L: mbarrier.try_wait.parity.shared.b64 q, [%r3], {}; @!q bra L; }}\n"
WAIT0, WAIT1 = WAIT.format(0), WAIT.format(1)
ADDRESS = "shl.b32 %r5, %r0, 2; add.s32 %r5, %r5, %r3;\n"
READ = (
    ADDRESS + "ld.shared.b32 %r9, [%r5+1024]; add.s64 %d20, %d0, %d30; st.global.b32 [%d20], %r9;\n"
)
WRITE = ADDRESS + "st.shared.b32 [%r5+1024], %r0;\n"
PROXY = "fence.proxy.async.shared::cta;\n"

LANDED = "before its bulk load landed"


@pytest.mark.parametrize(
    ("racy", "clean", "report"),
    [
        (INIT + LOAD + READ + WAIT0, INIT + LOAD + WAIT0 + READ, LANDED),
        # One warp waits, nobody tells the other.
        (INIT + LOAD + f"@!%p2 bra READ; {WAIT0} READ: {READ}",
         INIT + LOAD + f"@!%p2 bra READ; {WAIT0} READ: bar.sync 0; {READ}", LANDED),
        (INIT + LOAD + WRITE + WAIT0, INIT + LOAD + WAIT0 + WRITE, "overwritten " + LANDED),
        (INIT + LOAD + WAIT0 + READ + SECOND_LOAD + WAIT1,
         INIT + LOAD + WAIT0 + READ + SYNC + SECOND_LOAD + WAIT1,
         "overwritten with no synchronisation after its read"),
        (INIT + WRITE + SYNC + LOAD + WAIT0, INIT + WRITE + PROXY + SYNC + LOAD + WAIT0,
         "missing fence.proxy.async"),
        (INIT + LOAD, INIT + LOAD + WAIT0, "bulk load never waited for|do not balance"),
        (INIT.replace(INIT_FENCE, "") + LOAD + WAIT0, INIT + LOAD + WAIT0,
         "with no fence after its initialisation"),
        (INIT.replace(INIT_BARRIER, 2 * INIT_BARRIER) + LOAD + WAIT0, INIT + LOAD + WAIT0,
         "mbarrier initialised twice"),
        (INIT + LOAD.replace("%r3+1024", "%r3") + WAIT0, INIT + LOAD + WAIT0,
         "bulk load overwrites an mbarrier"),
    ],
    ids=["no-wait", "one-warp-waits", "overwritten-in-flight", "stage-reused",
         "proxy-fence", "never-waited", "init-fence", "init-twice", "into-mbarrier"],
)  # fmt: skip
def test_bulk_loads(racy: str, clean: str, report: str) -> None:
    check_twins(racy, clean, report, threads=64)


def test_the_other_parity_passes_on_a_fresh_barrier() -> None:
    for schedule, seed in RUNS:
        try:
            found = hazards_of(INIT + LOAD + WAIT1 + READ + WAIT0, schedule, seed, threads=64)
        except DeadlockError as deadlock:
            # The load landed first.
            assert "parity 1" in str(deadlock)
        else:
            assert found
            assert all(LANDED in hazard for hazard in found)


def test_use_before_init_is_ordered() -> None:
    # Warp 0 initialises; warp 1 learns of it through a flag in shared memory, which orders nothing.
    flag = "st.shared.b32 [%r3+64], 1;\n"
    poll = """
        { .reg .pred q; L: ld.volatile.shared.b32 %r7, [%r3+64]; setp.ne.u32 q, %r7, 1; @q bra L; }
    """
    head = SETUP + ELECT + INIT_BARRIER + INIT_FENCE
    racy = head + f"@%p1 {flag.replace('st.', 'st.volatile.')} {poll} " + LOAD + WAIT0
    for schedule, seed in RUNS:
        found = hazards_of(racy, schedule, seed, threads=64)
        assert any(
            "used before its initialisation is ordered" in h and "warp 1" in h for h in found
        )


def test_transactions_must_balance() -> None:
    short = INIT + LOAD.replace("_, [%r3], 256", "_, [%r3], 128") + WAIT0
    long = INIT + LOAD.replace("_, [%r3], 256", "_, [%r3], 512") + WAIT0
    for schedule, seed in RUNS:
        with pytest.raises(DeadlockError, match="tx -128"):
            hazards_of(short, schedule, seed)
        with pytest.raises(DeadlockError, match="tx 256"):
            hazards_of(long, schedule, seed)
    # Two loads, but the phase counts one of them.
    twice = INIT + EXPECT + COPY + COPY.replace("+1024", "+2048") + WAIT0
    found = [hazards_of(twice, schedule, seed) for schedule, seed in RUNS if schedule != "eager"]
    assert any(
        "completed before the load that it counts" in h for hazards in found for h in hazards
    )


def test_mbarrier_misuse_is_an_error() -> None:
    with pytest.raises(BarrierError, match="more than its pending count"):
        hazards_of(INIT + "@%p1 mbarrier.arrive.shared.b64 _, [%r3], 2;", "eager", 0)
    with pytest.raises(BarrierError, match="was not initialised"):
        hazards_of(SETUP + "mbarrier.arrive.shared.b64 _, [%r3];", "eager", 0)
    with pytest.raises(BarrierError, match="with count 0"):
        hazards_of(INIT.replace("[%r3], 1", "[%r3], 0"), "eager", 0)
    with pytest.raises(BarrierError, match=r"mbarrier\.init of 0x404"):
        hazards_of(INIT.replace("[%r3], 1", "[%r3+4], 1"), "eager", 0)
    with pytest.raises(BarrierError, match="transaction count out of range"):
        hazards_of(INIT + LOAD.replace("_, [%r3], 256", "_, [%r3], 1048576"), "eager", 0)


def test_inval_makes_room_for_another_init() -> None:
    again = INIT + "@%p1 mbarrier.inval.shared.b64 [%r3];\n" + INIT_BARRIER + INIT_FENCE + SYNC
    for schedule, seed in RUNS:
        assert hazards_of(again + LOAD + WAIT0 + READ, schedule, seed, threads=64) == []


def test_misaligned_bulk_copies_are_refused() -> None:
    with pytest.raises(AddressError, match="not 16-byte aligned"):
        hazards_of(INIT + LOAD.replace("+1024", "+1032") + WAIT0, "eager", 0)
    with pytest.raises(AddressError, match="not 16-byte aligned"):
        hazards_of(FILLED + STORE.replace("%r3+1024", "%r3+1028") + DRAIN, "eager", 0)


FILLED = SETUP + ELECT + WRITE + PROXY + SYNC
STORE = """
    @%p1 cp.async.bulk.global.shared::cta.bulk_group [%d0], [%r3+1024], 256;
    @%p1 cp.async.bulk.commit_group;
"""
DRAIN = "@%p1 cp.async.bulk.wait_group.read 0;\n"


@pytest.mark.parametrize(
    ("racy", "clean", "report"),
    [
        (FILLED + STORE + WRITE + DRAIN, FILLED + STORE + DRAIN + SYNC + WRITE,
         "while a bulk store still reads it"),
        # Warp 0 waits, warp 1 does not hear of it.
        (FILLED + STORE + DRAIN + WRITE, FILLED + STORE + DRAIN + SYNC + WRITE,
         "while a bulk store still reads it"),
        (FILLED + STORE + STORE.replace("%d0", "%d0+512") + DRAIN.replace("0;", "1;") + SYNC + WRITE
         + DRAIN, FILLED + STORE + STORE.replace("%d0", "%d0+512") + DRAIN + SYNC + WRITE,
         "while a bulk store still reads it"),
        (FILLED.replace(PROXY, "") + STORE + DRAIN, FILLED + STORE + DRAIN,
         "missing fence.proxy.async"),
        # Of the other memory.
        (FILLED.replace(PROXY, "fence.proxy.async.global;") + STORE + DRAIN, FILLED + STORE + DRAIN,
         "missing fence.proxy.async"),
        # A fence orders what was written before it.
        (FILLED.replace(WRITE + PROXY, PROXY + WRITE) + STORE + DRAIN, FILLED + STORE + DRAIN,
         "missing fence.proxy.async"),
        (FILLED.replace(SYNC, "") + STORE + DRAIN, FILLED + STORE + DRAIN,
         "read with no synchronisation|while a bulk store still reads it"),
        (FILLED + STORE, FILLED + STORE + DRAIN, "bulk store never waited for"),
        (FILLED + STORE.split(";")[0] + ";" + DRAIN, FILLED + STORE + DRAIN,
         "bulk store never waited for"),
    ],
    ids=["overwritten", "one-warp-waits", "waits-for-older", "proxy-fence", "global-fence",
         "fence-too-early", "no-barrier", "never-waited", "never-committed"],
)  # fmt: skip
def test_bulk_stores(racy: str, clean: str, report: str) -> None:
    check_twins(racy, clean, report, threads=64)


def test_a_fence_of_the_reader_will_do() -> None:
    fenced = FILLED.replace(PROXY, "") + PROXY + STORE + DRAIN
    assert hazards_of(fenced, "lazy", 0, threads=64) == []


CP = """
    shl.b32 %r5, %r0, 2; add.s32 %r5, %r5, %r3; add.s64 %d6, %d1, %d30;
    cp.async.ca.shared.global [%r5+1024], [%d6], 4; cp.async.commit_group;
"""
CP_WAIT = "cp.async.wait_group 0;\n"
READ_OTHER = """
    xor.b32 %r6, %r5, 128; ld.shared.b32 %r9, [%r6+1024];
    add.s64 %d20, %d0, %d30; st.global.b32 [%d20], %r9;
"""


@pytest.mark.parametrize(
    ("racy", "clean", "report"),
    [
        (SETUP + CP + READ + CP_WAIT, SETUP + CP + CP_WAIT + READ, "before its cp.async landed"),
        (SETUP + CP + CP_WAIT + READ_OTHER, SETUP + CP + CP_WAIT + SYNC + READ_OTHER,
         "before its cp.async landed|after its read"),
        (SETUP + CP + SYNC + READ_OTHER + CP_WAIT, SETUP + CP + CP_WAIT + SYNC + READ_OTHER,
         "before its cp.async landed"),
        (SETUP + CP + WRITE + CP_WAIT, SETUP + CP + CP_WAIT + WRITE,
         "overwritten before its cp.async landed"),
        (SETUP + ADDRESS + CP, SETUP + CP + CP_WAIT, "cp.async never waited for"),
    ],
    ids=["no-wait", "no-barrier", "wait-after-barrier", "overwritten", "never-waited"],
)  # fmt: skip
def test_cp_async(racy: str, clean: str, report: str) -> None:
    report += "|uninitialised|no synchronisation after its" if "after its read" in report else ""
    check_twins(racy, clean, report, threads=64)


def test_cp_async_may_signal_an_mbarrier() -> None:
    setup = SETUP + ELECT + INIT_BARRIER.replace(", 1;", ", 64;") + INIT_FENCE + SYNC
    signal = CP.replace("cp.async.commit_group", "cp.async.mbarrier.arrive.noinc.shared.b64 [%r3]")
    for schedule, seed in RUNS:
        waits = setup + signal + WAIT0 + READ_OTHER
        assert hazards_of(waits, schedule, seed, threads=64) == []
        assert hazards_of(setup + signal + READ_OTHER + WAIT0, schedule, seed, threads=64)


def test_values_show_what_the_lazy_schedule_delays() -> None:
    out, source = np.zeros(1024, np.uint32), np.arange(1, 1025, dtype=np.uint32)
    from tests.support.ptx import execute

    execute(INIT + LOAD + READ + WAIT0, out, source, threads=64, schedule="lazy")
    assert (out[:64] == 0xFFFFFFFF).all()
