"""Races between warps on shared memory: reported in every schedule, clean twins are not."""

from __future__ import annotations

import numpy as np
import pytest

from hopperflash.emulator.ptx_parser import parse_module
from tests.support.hazards import RUNS, check_twins, hazards_of
from tests.support.ptx import execute

# %r5: the thread's own word of shared memory; %r6: that of the thread in the other warp.
OWN = """
    mov.u32 %r3, smem; shl.b32 %r5, %r0, 2; add.s32 %r5, %r5, %r3; xor.b32 %r6, %r5, 128;
"""
WRITE = "st.shared.b32 [%r5], %r0;\n"
READ_OTHER = "ld.shared.b32 %r9, [%r6]; add.s64 %d20, %d0, %d30; st.global.b32 [%d20], %r9;\n"
SYNC = "bar.sync 0;\n"
READY = OWN + WRITE + SYNC


@pytest.mark.parametrize(
    ("racy", "clean", "report"),
    [
        (OWN + WRITE + READ_OTHER, READY + READ_OTHER, "read with no synchronisation after its"),
        (READY + READ_OTHER + WRITE, READY + READ_OTHER + SYNC + WRITE,
         "overwritten with no synchronisation after its read"),
        (OWN + WRITE + "st.shared.b32 [%r6], 7;", READY + "st.shared.b32 [%r6], 7;",
         "overwritten with no synchronisation after its write"),
        (OWN + WRITE + "bar.warp.sync -1;\n" + READ_OTHER, READY + READ_OTHER,
         "read with no synchronisation after its write"),
        (OWN + SYNC + READ_OTHER, READY + READ_OTHER, "uninitialised shared memory read"),
    ],
    ids=["read-after-write", "write-after-read", "write-after-write", "warp-barrier", "unwritten"],
)  # fmt: skip
def test_races_between_warps(racy: str, clean: str, report: str) -> None:
    check_twins(racy, clean, report, threads=64)


def test_a_barrier_orders_only_those_who_take_part() -> None:
    take_part = OWN + WRITE + "setp.ge.u32 %p1, %r0, 64; @%p1 bra PART2; bar.sync 1, 64; bra JOIN;"
    apart = take_part + "PART2: bar.sync 2, 64; JOIN: xor.b32 %r6, %r5, 256;\n" + READ_OTHER
    together = READY + "xor.b32 %r6, %r5, 256;\n" + READ_OTHER
    check_twins(apart, together, "read with no synchronisation", threads=128)


def test_producers_arrive_and_consumers_wait() -> None:
    def body(producer: str) -> str:
        return (
            OWN
            + f"""
            setp.ge.u32 %p1, %r0, 32; @%p1 bra CONSUMER;
            {producer}
        CONSUMER:
            bar.sync 3, 64; {READ_OTHER}
        """
        )

    check_twins(
        body("bar.arrive 3, 64; st.shared.b32 [%r5], %r0; ret;"),
        body("st.shared.b32 [%r5], %r0; bar.arrive 3, 64; ret;"),
        "no synchronisation after its|uninitialised",
        threads=64,
    )


def test_neighbouring_words_do_not_race() -> None:
    # Warp w writes word w of a 16-byte piece: a reduction buffer.
    body = """
        mov.u32 %r3, smem; shr.u32 %r4, %r0, 5; shl.b32 %r5, %r4, 2; add.s32 %r5, %r5, %r3;
        st.shared.b32 [%r5], %r4; bar.sync 0;
        ld.shared.v4.b32 {%r6, %r7, %r8, %r9}, [%r3];
    """
    for schedule, seed in RUNS:
        assert hazards_of(body, schedule, seed, threads=128) == []


def test_atomics_race_with_plain_accesses_only() -> None:
    start = "mov.u32 %r3, smem; st.shared.b32 [%r3], 0; bar.sync 0;\n".replace(
        "st.", "setp.ne.u32 %p1, %r0, 0; @!%p1 st."
    )
    add = "red.shared.add.u32 [%r3], 1;\n"
    read = "ld.shared.b32 %r9, [%r3]; st.global.b32 [%d0], %r9;\n"
    check_twins(start + add + read, start + add + SYNC + read, "no synchronisation", threads=64)


def test_shared_memory_of_another_cta() -> None:
    start = """
        mov.u32 %r3, smem; st.shared.b32 [%r3], %r0; mov.u32 %r2, %cluster_ctarank;
        xor.b32 %r4, %r2, 1; mapa.shared::cluster.u32 %r5, %r3, %r4;
    """
    sync = "barrier.cluster.arrive{}.aligned; barrier.cluster.wait.aligned;\n"
    read = "ld.shared::cluster.b32 %r9, [%r5]; st.global.b32 [%d0], %r9;\n"
    last = sync.format("")
    twin = start + sync.format("") + read + last
    check_twins(start + sync.format(".relaxed") + read + last, twin,
                "read with no synchronisation", grid=2, cluster=2)  # fmt: skip


def test_relaxed_arrivals_hand_on_fenced_initialisations_only() -> None:
    """With `fence.mbarrier_init` a relaxed cluster barrier is enough for mbarriers."""
    start = """
        mov.u32 %r3, smem; mov.u32 %r2, %cluster_ctarank; xor.b32 %r4, %r2, 1;
        mapa.shared::cluster.u32 %r5, %r3, %r4; setp.eq.u32 %p1, %r0, 0;
        {first} {second}
        barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.aligned;
        @%p1 mbarrier.arrive.shared::cluster.b64 _, [%r5];
        {{ .reg .pred q; L: mbarrier.try_wait.parity.shared.b64 q, [%r3], 0; @!q bra L; }}
        barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    """
    init, fence = (
        "@%p1 mbarrier.init.shared.b64 [%r3], 1;",
        "@%p1 fence.mbarrier_init.release.cluster;",
    )
    check_twins(
        start.format(first=fence, second=init), start.format(first=init, second=fence),
        "mbarrier used before its initialisation is ordered", grid=2, cluster=2,
    )  # fmt: skip


def test_repeats_are_counted() -> None:
    loop = (
        OWN
        + "mov.b32 %r1, 0;\nAGAIN:\n"
        + WRITE
        + READ_OTHER
        + """
        add.s32 %r1, %r1, 1; setp.lt.u32 %p1, %r1, 5; @%p1 bra AGAIN;
    """
    )
    found = hazards_of(loop, "eager", 0, threads=64)
    assert all(hazard.endswith(" times)") for hazard in found)
    assert len(found) == len(set(found)) <= 3


def test_basic_checks_leave_races_out() -> None:
    assert hazards_of(OWN + WRITE + READ_OTHER, "eager", 0, threads=64, checks="basic") == []
    with pytest.raises(ValueError, match="is not one of full, basic"):
        hazards_of(OWN, "eager", 0, checks="some")


def test_line_information_names_the_source() -> None:
    text = """
    .version 8.8
    .target sm_90a
    .address_size 64
    .shared .align 16 .b8 buffer[256];
    .visible .entry kernel(.param .u64 p0)
    {
        .reg .b32 %r<9>;
        .loc 1 17 3
        mov.u32 %r0, %tid.x; mov.u32 %r1, buffer;
        shl.b32 %r2, %r0, 2; add.s32 %r3, %r1, %r2; xor.b32 %r4, %r3, 128;
        .loc 1 18 3
        st.shared.b32 [%r3], %r0;
        .loc 1 21 5
        ld.shared.b32 %r5, [%r4];
        ret;
    }
    .file 1 "/home/me/kernel.py"
    """
    kernel = parse_module(text).kernels["kernel"]
    found = execute(kernel, np.zeros(1, np.uint32), threads=64).hazards
    assert "(/home/me/kernel.py:21)" in found[0]
    assert "(/home/me/kernel.py:18)" in found[0]
    assert "warp" in found[0]
