"""Races on global memory between CTAs, and the flags that order them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar, cast

import numpy as np
import pytest

from hopperflash.emulator.global_order import GlobalOrder
from hopperflash.emulator.ptx_ir import Instruction
from tests.support.ptx import execute

RUNS = (("eager", 0), ("lazy", 0), ("random", 1), ("random", 2))

# CTA 0 writes its threads' words of %d0, CTA 1 reads them; the flag is %d1.
WRITER = """
    mov.u32 %r2, %ctaid.x; setp.ne.u32 %p1, %r2, 0; add.s64 %d20, %d0, %d30;
    setp.ne.u32 %p2, %r0, 0; @%p1 bra READER;
    {write}
    {signal}
    ret;
READER:
    {wait}
    ld.global.b32 %r9, [%d20]; st.global.b32 [%d20+512], %r9;
"""
WRITE = "st.global.b32 [%d20], 7;"
RELEASE = "bar.warp.sync -1; @!%p2 red.release.gpu.global.add.u32 [%d1], 1;"
ACQUIRE = "SPIN: ld.acquire.gpu.global.b32 %r9, [%d1]; setp.eq.u32 %p3, %r9, 0; @%p3 bra SPIN;"
RELAXED = RELEASE.replace("release", "relaxed")
RELAXED_LOAD = ACQUIRE.replace("acquire", "relaxed")
FENCE = "fence.acq_rel.gpu;"


def _hazards(schedule: str, seed: int, write: str, signal: str, wait: str) -> list[str]:
    data, flag = np.zeros(1024, np.uint32), np.zeros(1, np.uint32)
    body = WRITER.format(write=write, signal=signal, wait=wait)
    return execute(body, data, flag, grid=2, schedule=schedule, seed=seed).hazards


@pytest.mark.parametrize(
    ("signal", "wait"),
    [
        (RELEASE, ACQUIRE),
        (FENCE + RELAXED, RELAXED_LOAD + FENCE),
        (FENCE + RELAXED, ACQUIRE),
        (RELEASE, RELAXED_LOAD + FENCE),
    ],
    ids=["release-acquire", "fences", "fence-acquire", "release-fence"],
)
def test_flags_order_ctas(signal: str, wait: str) -> None:
    for schedule, seed in RUNS:
        assert _hazards(schedule, seed, WRITE, signal, wait) == []


@pytest.mark.parametrize(
    ("signal", "wait"),
    [("", ""), (RELAXED, ACQUIRE), (RELEASE, RELAXED_LOAD), (RELAXED + FENCE, ACQUIRE)],
    ids=["no-flag", "no-release", "no-acquire", "fence-too-late"],
)
def test_ctas_race(signal: str, wait: str) -> None:
    for schedule, seed in RUNS:
        found = _hazards(schedule, seed, WRITE, signal, wait)
        assert found
        assert all("global memory" in h and "no synchronisation after its" in h for h in found)
        assert any("PTX line" in h and "by CTA" in h for h in found)


def test_both_write() -> None:
    body = "mov.u32 %r2, %ctaid.x; st.global.b32 [%d0], %r2;"
    for schedule, seed in RUNS:
        data = np.zeros(1, np.uint32)
        (found,) = execute(body, data, grid=2, schedule=schedule, seed=seed).hazards
        assert "global memory overwritten with no synchronisation after its write" in found
        assert (
            execute("red.global.add.u32 [%d0], 1;", data, grid=2, schedule=schedule).hazards == []
        )


def test_the_same_value_may_be_written_twice() -> None:
    for schedule, seed in RUNS:
        data = np.zeros(1, np.uint32)
        twice = execute("st.global.b32 [%d0], 1;", data, grid=2, schedule=schedule, seed=seed)
        assert twice.hazards == []


FILL = """
    mov.u32 %r3, smem; shl.b32 %r5, %r0, 2; add.s32 %r5, %r5, %r3; st.shared.b32 [%r5], 7;
    fence.proxy.async.shared::cta; bar.warp.sync -1;
    @!%p2 cp.async.bulk.global.shared::cta.bulk_group [%d0], [%r3], 128;
    @!%p2 cp.async.bulk.commit_group;
"""
READS_DONE = "@!%p2 cp.async.bulk.wait_group.read 0;"
DONE = "@!%p2 cp.async.bulk.wait_group 0;"


def test_a_bulk_store_is_known_after_the_full_wait() -> None:
    for schedule, seed in RUNS:
        assert _hazards(schedule, seed, FILL + DONE, RELEASE, ACQUIRE) == []
        found = _hazards(schedule, seed, FILL + READS_DONE, RELEASE, ACQUIRE)
        assert found or schedule == "lazy", "lazy: the store lands after the reader is gone"
        assert all("no synchronisation after its" in hazard for hazard in found)


ADD = "red.relaxed.gpu.global.add.f32 [%d20], %r4;"


def test_sums_in_no_fixed_order() -> None:
    """Only where it is asked for: floating-point additions must be ordered like other accesses."""

    def found(signal: str, wait: str, add: str, checks: str, schedule: str, seed: int) -> list[str]:
        body = f"""
            mov.b32 %r4, 0f3F800000; mov.u32 %r2, %ctaid.x; setp.ne.u32 %p1, %r2, 0;
            add.s64 %d20, %d0, %d30; setp.ne.u32 %p2, %r0, 0; @%p1 bra SECOND;
            {add} {signal} ret;
        SECOND:
            {wait} {add}
        """
        data, flag = np.zeros(1024, np.float32), np.zeros(1, np.uint32)
        return execute(
            body, data, flag, grid=2, schedule=schedule, seed=seed, checks=checks
        ).hazards

    for schedule, seed in RUNS:
        assert found(RELEASE, ACQUIRE, ADD, "ordered", schedule, seed) == []
        assert found("", "", ADD, "full", schedule, seed) == []
        assert found("", "", ADD.replace("f32", "u32"), "ordered", schedule, seed) == []
        for signal, wait in (("", ""), (RELAXED, ACQUIRE), (RELEASE, RELAXED_LOAD)):
            (hazard,) = found(signal, wait, ADD, "ordered", schedule, seed)
            assert "floating-point additions in no fixed order" in hazard


@pytest.mark.parametrize("missing", ["before", "after"])
def test_a_turn_of_one_warp_for_all(missing: str) -> None:
    """Thread 0 waits for the turn and passes it on; barriers tell the other warp."""
    body = """
        mov.u32 %r2, %ctaid.x; setp.ne.u32 %p2, %r0, 0; mov.b32 %r4, 0f3F800000;
        add.s64 %d20, %d0, %d30; @%p2 bra TAKEN;
    TURN:
        ld.acquire.gpu.global.b32 %r9, [%d1]; setp.ne.u32 %p3, %r9, %r2; @%p3 bra TURN;
    TAKEN:
        {before}
        red.relaxed.gpu.global.add.f32 [%d20], %r4;
        {after}
        @!%p2 red.release.gpu.global.add.u32 [%d1], 1;
    """
    clean = {"before": "bar.sync 0;", "after": "bar.sync 0;"}
    for schedule, seed in RUNS:
        for barriers in (clean, clean | {missing: ""}):
            data, turn = np.zeros(1024, np.float32), np.zeros(1, np.uint32)
            outcome = execute(
                body.format(**barriers), data, turn, threads=64, grid=2, schedule=schedule,
                seed=seed, checks="ordered",
            )  # fmt: skip
            assert bool(outcome.hazards) == (barriers is not clean)
            assert all("in no fixed order" in hazard for hazard in outcome.hazards)


@pytest.mark.parametrize("missing", ["taken", "passed", "wait"])
def test_turns_of_bulk_additions_need_proxy_fences(missing: str) -> None:
    body = """
        mov.u32 %r2, %ctaid.x; setp.ne.u32 %p2, %r0, 0; mov.u32 %r3, smem; shl.b32 %r5, %r0, 2;
        add.s32 %r5, %r5, %r3; st.shared.b32 [%r5], 0f3F800000;
        fence.proxy.async.shared::cta; bar.warp.sync -1; @%p2 ret;
    TURN:
        ld.acquire.gpu.global.b32 %r9, [%d1]; setp.ne.u32 %p3, %r9, %r2; @%p3 bra TURN;
        {taken}
        cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%d0], [%r3], 128;
        cp.async.bulk.commit_group; cp.async.bulk.wait_group{wait} 0;
        {passed}
        red.release.gpu.global.add.u32 [%d1], 1;
    """
    clean = dict.fromkeys(("taken", "passed"), "fence.proxy.async.global;") | {"wait": ""}
    broken = clean | {missing: ".read" if missing == "wait" else ""}
    for schedule, seed in RUNS:
        for parts in (clean, broken):
            data, turn = np.zeros(1024, np.float32), np.zeros(1, np.uint32)
            outcome = execute(
                body.format(**parts), data, turn, grid=3, schedule=schedule, seed=seed,
                checks="ordered",
            )  # fmt: skip
            assert all("in no fixed order" in hazard for hazard in outcome.hazards)
            # With `.read` a late store may come behind everything else.
            assert outcome.hazards or parts is clean or (missing, schedule) == ("wait", "lazy")
            assert parts is not clean or outcome.hazards == []


def test_turns_order_what_they_enclose() -> None:
    # CTA i adds in its turn, as the deterministic backward does.
    body = """
        mov.u32 %r2, %ctaid.x; setp.ne.u32 %p2, %r0, 0; @%p2 ret;
    TURN:
        ld.acquire.gpu.global.b32 %r9, [%d1]; setp.ne.u32 %p3, %r9, %r2; @%p3 bra TURN;
        ld.global.b32 %r4, [%d0]; mad.lo.s32 %r4, %r4, 3, %r2; st.global.b32 [%d0], %r4;
        red.release.gpu.global.add.u32 [%d1], 1;
    """
    for schedule, seed in RUNS:
        total, turn = np.zeros(1, np.uint32), np.zeros(1, np.uint32)
        outcome = execute(body, total, turn, grid=4, schedule=schedule, seed=seed)
        assert outcome.hazards == []
        assert total[0] == (0 * 3 + 1) * 9 + 2 * 3 + 3


def test_a_relaxed_read_knows_no_later_release() -> None:
    """Addresses with one history share its record: it must stay what it was when it was read."""

    class Log:
        kinds: ClassVar[list[str]] = []

        def report(self, kind: str, *_: Any, **__: Any) -> None:
            self.kinds.append(kind)

    def instruction(opcode: str) -> Instruction:
        return Instruction(opcode, (), None, False, 1, opcode)

    writer, reader = (
        SimpleNamespace(cluster=[SimpleNamespace(serial=serial)], index=serial) for serial in (1, 2)
    )
    release, relaxed = instruction("red.release.gpu"), instruction("ld.relaxed.gpu")
    order, flags = GlobalOrder(cast(Any, Log())), np.array([64, 72])
    for word, read_again in ((0, False), (1, True)):
        order.flag(writer, flags, release, read=True, write=True)
        order.flag(reader, flags, relaxed, read=True, write=False)
        order.begin(writer, release)
        order.items(0, 16, np.array([word]), 4, write=True)
        order.flag(writer, flags[:1], release, read=True, write=True)
        if read_again:
            order.flag(reader, flags[:1], relaxed, read=True, write=False)
        order.fence(reader)
        order.begin(reader, relaxed)
        order.items(0, 16, np.array([word]), 4, write=False)
        assert len(Log.kinds) == 1
