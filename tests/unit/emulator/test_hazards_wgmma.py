"""Hazards of wgmma: register fences, operands in flight, shared memory it still reads."""

from __future__ import annotations

import re

import pytest

from hopperflash.emulator.errors import BarrierError, InvalidDescriptor
from tests.support.hazards import RUNS, check_twins, hazards_of

# 2 KB of ones at smem, written by all threads; %d6 describes 64 x 16 and 8 x 16 elements of it.
FILL = """
    mov.u32 %r3, smem; mov.b32 %r6, 1006648320; rem.u32 %r4, %r0, 128;
    shl.b32 %r5, %r4, 4; add.s32 %r5, %r5, %r3;
"""
WRITE = "st.shared.v4.b32 [%r5], {%r6, %r6, %r6, %r6};\n"
PROXY = "fence.proxy.async.shared::cta;\n"
SYNC = "bar.sync 0;\n"
DESCRIPTOR = """
    shr.u32 %r7, %r3, 4; cvt.u64.u32 %d5, %r7; or.b64 %d6, %d5, 68720001024;
    setp.ne.s32 %p5, %r3, 0;
"""
ZERO = "".join(f"mov.b32 %r{100 + i}, 0; " for i in range(4)) + "\n"
CLEARED = "and.b32 %r101, %r101, 0;\n"
A_READY = "".join(f"mov.b32 %r{110 + i}, %r6; " for i in range(4)) + "\n"
FENCE = "wgmma.fence.sync.aligned;\n"
D = "{%r100, %r101, %r102, %r103}"
A = "{%r110, %r111, %r112, %r113}"
MMA = f"wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {D}, %d6, %d6, %p5, 1, 1, 0, 0;\n"
MMA_RS = f"wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {D}, {A}, %d6, %p5, 1, 1, 0;\n"
COMMIT = "wgmma.commit_group.sync.aligned;\n"
WAIT = "wgmma.wait_group.sync.aligned 0;\n"
LATER = WAIT.replace("0;", "1;")
SCALE = "add.f32 %r100, %r100, %r100;\n"
USE = "add.s64 %d20, %d0, %d30; st.global.b32 [%d20], %r103;\n"

READY = FILL + WRITE + PROXY + SYNC + DESCRIPTOR + ZERO + A_READY
START = READY + FENCE + MMA + COMMIT
AGAIN = FENCE + MMA + COMMIT + WAIT


@pytest.mark.parametrize(
    ("racy", "clean", "report"),
    [
        (READY + MMA + COMMIT + WAIT, START + WAIT, "missing wgmma.fence"),
        (READY + FENCE + CLEARED + MMA + COMMIT + WAIT,
         READY + CLEARED + FENCE + MMA + COMMIT + WAIT, "missing wgmma.fence"),
        (START + WAIT + SCALE + MMA + COMMIT + WAIT, START + WAIT + SCALE + AGAIN,
         "missing wgmma.fence"),
        # Reading an accumulator counts as well.
        (START + WAIT + USE + MMA + COMMIT + WAIT, START + WAIT + MMA + COMMIT + WAIT,
         "missing wgmma.fence"),
        (READY + FENCE + MMA_RS + COMMIT + WAIT + A_READY + MMA_RS + COMMIT + WAIT,
         READY + FENCE + MMA_RS + COMMIT + WAIT + A_READY + FENCE + MMA_RS + COMMIT + WAIT,
         "missing wgmma.fence"),
        (READY + FENCE + MMA_RS + COMMIT + A_READY + WAIT,
         READY + FENCE + MMA_RS + COMMIT + WAIT + A_READY,
         "A operand written while its wgmma is in flight"),
        (START + SCALE + WAIT, START + WAIT + SCALE,
         "accumulator touched while its wgmma is in flight"),
        (START + LATER + USE + WAIT, START + WAIT + USE,
         "accumulator touched while its wgmma is in flight"),
        (READY + FENCE + MMA, START + WAIT, "wgmma never waited for"),
        (START + WRITE + WAIT, START + WAIT + SYNC + WRITE, "while a wgmma still reads it"),
        (START + LATER + SYNC + WRITE + WAIT, START + WAIT + SYNC + WRITE,
         "while a wgmma still reads it"),
        (START.replace(PROXY, "") + WAIT, START + WAIT, "missing fence.proxy.async"),
        (START.replace(SYNC, "") + WAIT, START + WAIT, "read with no synchronisation"),
    ],
    ids=["first-fence", "accumulator-zeroed", "accumulator-scaled", "accumulator-read",
         "a-rewritten", "a-in-flight", "accumulator-in-flight", "waits-for-older",
         "never-waited", "overwritten",
         "overwritten-after-barrier", "proxy-fence", "barrier"],
)  # fmt: skip
def test_wgmma(racy: str, clean: str, report: str) -> None:
    check_twins(racy, clean, report, threads=128)


def test_constants_of_accumulators_may_follow_the_fence() -> None:
    """Compilers sink them below the fence of `accumulators.fill(0); fence()`."""
    zero, copy = "mov.b32 %r100, 0;\n", "mov.b32 %r101, %r100; mov.b32 %r102, %r101;\n"
    clean = READY + FENCE + zero + copy + MMA + COMMIT + WAIT
    # Copies of anything else are accesses, and so are constants of the A operand.
    check_twins(READY + FENCE + "mov.b32 %r100, %r5;\n" + copy + MMA + COMMIT + WAIT, clean,
                "missing wgmma.fence", threads=128)  # fmt: skip
    check_twins(READY + FENCE + zero + CLEARED + MMA + COMMIT + WAIT, clean,
                "missing wgmma.fence", threads=128)  # fmt: skip
    check_twins(READY + FENCE + "mov.b32 %r110, 0;\n" + MMA_RS + COMMIT + WAIT, clean,
                "missing wgmma.fence", threads=128)  # fmt: skip


def test_another_warpgroup_overwrites_what_is_being_read() -> None:
    """The bug that the backward kernel's first version had: no schedule showed a wrong value."""
    first = FILL + "setp.lt.u32 %p1, %r0, 128;\n@%p1 " + WRITE + PROXY + SYNC
    start = first + DESCRIPTOR + ZERO + FENCE + MMA + COMMIT
    # Both wait for their own wgmma; then the first overwrites what the second may still read.
    racy = start + WAIT + "@%p1 " + WRITE
    clean = start + WAIT + SYNC + "@%p1 " + WRITE
    check_twins(racy, clean, "while a wgmma still reads it", threads=256)
    # A wait behind the barrier does not help.
    late = start + LATER + SYNC + "@%p1 " + WRITE + WAIT
    check_twins(late, clean, "while a wgmma still reads it", threads=256)


def test_a_warp_may_write_its_own_rows_of_a_without_a_barrier() -> None:
    # Warp w writes rows 16w..16w+15 of A at smem; B lies behind it, ready.
    rows = """
        mov.u32 %r3, smem; mov.b32 %r6, 1006648320; mov.b32 %r9, 0; shl.b32 %r5, %r0, 4;
        add.s32 %r5, %r5, %r3; setp.lt.u32 %p2, %r0, 16; shl.b32 %r8, %r0, 4; add.s32 %r8, %r8, %r3;
        @%p2 st.shared.v4.b32 [%r8+2048], {%r6, %r6, %r6, %r6};
    """
    # K-major without swizzle: 8 rows are 128 bytes, the second half of k follows at 1024.
    describe = """
        and.b32 %r4, %r0, 31; shr.u32 %r7, %r0, 5; shl.b32 %r7, %r7, 8; and.b32 %r11, %r4, 15;
        shl.b32 %r11, %r11, 4; add.s32 %r7, %r7, %r11; shr.u32 %r4, %r4, 4; shl.b32 %r4, %r4, 10;
        add.s32 %r7, %r7, %r4; add.s32 %r5, %r7, %r3;
        shr.u32 %r12, %r3, 4; cvt.u64.u32 %d5, %r12; mov.b64 %d7, 34363932672;
        or.b64 %d6, %d5, %d7;
        add.s32 %r13, %r12, 128; cvt.u64.u32 %d8, %r13; mov.b64 %d9, 34360262656;
        or.b64 %d8, %d8, %d9;
        setp.ne.s32 %p5, %r3, 0;
    """
    mma = MMA.replace("%d6, %d6", "%d6, %d8")
    own = rows + PROXY + SYNC + describe + WRITE + PROXY + ZERO + FENCE + mma + COMMIT + WAIT
    for schedule, seed in RUNS:
        assert hazards_of(own, schedule, seed, threads=128) == []
    # Another warp's rows need a barrier.
    swapped = own.replace(WRITE, "xor.b32 %r5, %r5, 256;\n" + WRITE)
    for schedule, seed in RUNS:
        found = hazards_of(swapped, schedule, seed, threads=128)
        assert found
        assert all("read with no synchronisation after its write" in hazard for hazard in found)


def test_operands_start_in_the_first_row_of_their_pattern() -> None:
    # 64 x 16 and 8 x 16 elements in rows of 32 bytes with the 32-byte swizzle.
    swizzled = 1 << 16 | 256 >> 4 << 32 | 3 << 62
    describe = f"mov.b64 %d7, {swizzled}; or.b64 %d6, %d5, %d7;\n"
    moved = f"add.s64 %d6, %d6, {32 >> 4};\n"
    issue = FENCE + MMA + COMMIT + WAIT
    check_twins(READY + describe + moved + issue, READY + describe + issue,
                "matrix descriptor misaligned: shared 0x420 is in row 1 of its 256-byte pattern",
                threads=128)  # fmt: skip


def test_operands_outside_of_shared_memory_are_refused() -> None:
    issue = FENCE + MMA + COMMIT + WAIT
    assert hazards_of(READY + issue, "eager", 0, threads=128, shared_bytes=2048) == []
    outside = READY + f"add.s64 %d6, %d6, {1024 >> 4};\n" + issue
    for checks in ("full", "basic"):
        with pytest.raises(InvalidDescriptor, match="leaves shared memory"):
            hazards_of(outside, "eager", 0, threads=128, shared_bytes=2048, checks=checks)


def test_wgmma_takes_whole_warpgroups() -> None:
    message = re.escape("it takes whole warpgroups")
    with pytest.raises(BarrierError, match=message):
        hazards_of(START + WAIT, "eager", 0, threads=96)
    early = "setp.lt.u32 %p1, %r0, 32; @%p1 ret;\n"
    with pytest.raises(BarrierError, match=message):
        hazards_of(READY + early + FENCE + MMA + COMMIT + WAIT, "eager", 0, threads=128)
