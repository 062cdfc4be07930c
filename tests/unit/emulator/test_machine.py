"""Control flow, memory, barriers and errors of the machine on hand-written kernels."""

from __future__ import annotations

import numpy as np
import pytest

from hopperflash.emulator.errors import (
    AddressError,
    BarrierError,
    DeadlockError,
    EmulationError,
    UnknownInstruction,
)
from hopperflash.emulator.ptx_parser import parse_module
from tests.support.ptx import execute, kernel_of

SCHEDULES = ["eager", "lazy", "random"]

STORE = "add.s64 %d20, %d0, %d30; st.global.b32 [%d20], %r9;"


def test_divergent_branches_meet_again() -> None:
    out = np.zeros(64, np.uint32)
    body = f"""
        and.b32 %r1, %r0, 3; setp.eq.s32 %p1, %r1, 1; mov.b32 %r9, 5;
        @%p1 bra THEN;
        add.s32 %r9, %r9, %r0;
        bra.uni JOIN;
    THEN:
        mul.lo.s32 %r9, %r0, 100;
    JOIN:
        shfl.sync.bfly.b32 %r9, %r9, 1, 31, -1;
        {STORE}
    """
    for schedule in SCHEDULES:
        execute(body, out, threads=64, schedule=schedule)
        t = np.arange(64)
        before = np.where(t & 3 == 1, t * 100, t + 5)
        assert np.array_equal(out, before[t ^ 1])


def test_loop_with_a_trip_count_per_thread() -> None:
    out = np.zeros(96, np.uint32)
    body = f"""
        mov.b32 %r9, 0; and.b32 %r1, %r0, 7;
    LOOP:
        setp.eq.u32 %p1, %r1, 0; @%p1 bra DONE;
        add.s32 %r9, %r9, %r1; sub.s32 %r1, %r1, 1; bra LOOP;
    DONE:
        {STORE}
    """
    execute(body, out, threads=96)
    n = np.arange(96) & 7
    assert np.array_equal(out, n * (n + 1) // 2)


def test_guards_and_early_exit() -> None:
    out = np.zeros(32, np.uint32)
    body = f"""
        setp.lt.u32 %p1, %r0, 10; mov.b32 %r9, 1;
        @%p1 add.s32 %r9, %r9, %r0;
        setp.gt.u32 %p2, %r0, 20;
        @%p2 ret;
        @!%p1 mov.b32 %r9, 77;
        {STORE}
    """
    execute(body, out)
    t = np.arange(32)
    assert np.array_equal(out, np.where(t > 20, 0, np.where(t < 10, t + 1, 77)))


def test_scoped_names_of_inline_blocks() -> None:
    out = np.zeros(32, np.uint32)
    block = """
        {
        .reg .pred p; .reg .b32 t;
        mov.b32 t, 3;
        LAB: add.s32 %r9, %r9, t; sub.s32 t, t, 1;
        setp.ne.s32 p, t, 0;
        @p bra LAB;
        }
    """
    execute(f"mov.b32 %r9, 0; {block} {block} {STORE}", out)
    assert (out == 12).all()


def test_batched_operations_keep_their_order() -> None:
    out = np.zeros(32, np.uint32)
    body = f"""
        mov.b32 %r1, 1; mov.b32 %r2, 2; mov.b32 %r3, 3;
        mov.b32 %r4, %r1; mov.b32 %r1, %r2; mov.b32 %r2, %r3; mov.b32 %r3, %r4;
        mad.lo.s32 %r9, %r1, 100, %r3; mad.lo.s32 %r9, %r2, 10, %r9;
        {STORE}
    """
    execute(body, out)
    assert (out == 231).all()


def test_vector_and_narrow_memory_access() -> None:
    data = np.arange(128, dtype=np.uint32)
    out = np.zeros(128, np.uint32)
    body = """
        mul.wide.u32 %d10, %r0, 16; add.s64 %d11, %d1, %d10; add.s64 %d12, %d0, %d10;
        ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%d11];
        mov.u32 %r10, smem; shl.b32 %r11, %r0, 4; add.s32 %r10, %r10, %r11;
        st.shared.v4.b32 [%r10], {%r4, %r3, %r2, %r1};
        ld.shared.v2.b32 {%r5, %r6}, [%r10+8];
        ld.shared.s8 %r7, [%r10]; ld.shared.u16 %h1, [%r10+4]; cvt.u32.u16 %r8, %h1;
        st.global.v4.b32 [%d12], {%r5, %r6, %r7, %r8};
    """
    execute(body, out, data)
    rows = data.reshape(32, 4)
    expected = np.stack([rows[:, 1], rows[:, 0], rows[:, 3], rows[:, 2]], 1)
    assert np.array_equal(out.reshape(32, 4), expected)


def test_generic_addresses_reach_shared_and_global() -> None:
    out = np.zeros(32, np.uint32)
    body = """
        mov.u32 %r1, smem; shl.b32 %r2, %r0, 2; add.s32 %r1, %r1, %r2; cvt.u64.u32 %d5, %r1;
        st.b32 [%d5], %r0; ld.b32 %r9, [%d5];
        add.s64 %d20, %d0, %d30; st.b32 [%d20], %r9;
    """
    execute(body, out)
    assert np.array_equal(out, np.arange(32))


def test_local_memory_is_private_to_a_thread() -> None:
    out = np.zeros(64, np.uint32)
    body = f"""
        .local .align 8 .b8 depot[16];
        mov.u64 %d5, depot; st.local.b32 [%d5+4], %r0;
        cvta.local.u64 %d6, %d5; ld.b32 %r9, [%d6+4];
        {STORE}
    """
    execute(body, out, threads=64)
    assert np.array_equal(out, np.arange(64))


def test_atomics() -> None:
    total, out = np.zeros(1, np.uint32), np.zeros(64, np.uint32)
    body = f"atom.global.add.u32 %r9, [%d1], 2; {STORE}"
    execute(body, out, total, threads=64)
    assert total[0] == 128
    assert sorted(out.tolist()) == list(range(0, 128, 2))
    sums = np.zeros(1, np.float32)
    execute("mov.b32 %r1, 0f3F000000; red.global.add.f32 [%d0], %r1;", sums)
    assert sums[0] == 16


def test_shuffles_votes_and_election() -> None:
    out = np.zeros(32, np.uint32)
    t = np.arange(32)
    for mode, clamp, expected in (
        ("up.b32", 0, np.where(t >= 3, t - 3, t)),
        ("down.b32", 31, np.where(t + 3 < 32, t + 3, t)),
        ("idx.b32", 31, np.full(32, 3)),
        ("bfly.b32", 31, t ^ 3),
    ):
        execute(f"shfl.sync.{mode} %r9, %r0, 3, {clamp}, -1; {STORE}", out)
        assert np.array_equal(out, expected), mode
    execute(f"setp.gt.u32 %p1, %r0, 29; vote.sync.ballot.b32 %r9, %p1, -1; {STORE}", out)
    assert (out == 3 << 30).all()
    execute(f"elect.sync %r1|%p1, -1; selp.b32 %r9, 7, 8, %p1; {STORE}", out)
    assert out.tolist() == [7] + [8] * 31
    execute(f"redux.sync.add.u32 %r9, %r0, -1; {STORE}", out)
    assert (out == 496).all()


def test_matrix_store_and_load_round_trip() -> None:
    out = np.zeros(32, np.uint32)
    for trans in ("", ".trans"):
        body = f"""
            mov.u32 %r1, smem; shl.b32 %r2, %r0, 4; add.s32 %r1, %r1, %r2;
            mul.lo.s32 %r3, %r0, 65537;
            add.s32 %r4, %r3, 1; add.s32 %r5, %r3, 2; add.s32 %r6, %r3, 3;
            stmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 [%r1], {{%r3, %r4, %r5, %r6}};
            ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{%r10, %r11, %r9, %r12}}, [%r1];
            {STORE}
        """
        execute(body, out)
        assert np.array_equal(out, np.arange(32, dtype=np.uint32) * 65537 + 2)


def test_mma_against_matmul() -> None:
    rng = np.random.default_rng(0)
    a = rng.standard_normal((16, 16)).astype(np.float16)
    b = rng.standard_normal((16, 8)).astype(np.float16)
    lane = np.arange(32)
    g, t = lane // 4, lane % 4

    def pair(m: np.ndarray, r: np.ndarray, c: np.ndarray, dr: int, dc: int) -> np.ndarray:
        low = m[r, c].view(np.uint16).astype(np.uint32)
        return low | m[r + dr, c + dc].view(np.uint16).astype(np.uint32) << 16

    fragments = [pair(a, g + 8 * (i & 1), 2 * t + 8 * (i >> 1), 0, 1) for i in range(4)]
    fragments += [pair(b, 2 * t + 8 * i, g, 1, 0) for i in range(2)]
    source = np.stack(fragments, 1).astype(np.uint32).copy()
    out = np.zeros((32, 4), np.float32)
    loads = "".join(f"ld.global.b32 %r{i + 1}, [%d10+{4 * i}];" for i in range(6))
    body = f"""
        mul.wide.u32 %d9, %r0, 24; add.s64 %d10, %d1, %d9; {loads}
        mov.b32 %r20, 0f3F800000;
        mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {{%r10, %r11, %r12, %r13}},
            {{%r1, %r2, %r3, %r4}}, {{%r5, %r6}}, {{%r20, %r20, %r20, %r20}};
        mul.wide.u32 %d11, %r0, 16; add.s64 %d12, %d0, %d11;
        st.global.v4.b32 [%d12], {{%r10, %r11, %r12, %r13}};
    """
    execute(body, out, source)
    product = a.astype(np.float32) @ b.astype(np.float32) + 1
    for i in range(4):
        np.testing.assert_allclose(out[:, i], product[g + 8 * (i >> 1), 2 * t + (i & 1)], rtol=1e-5)


BARRIER = """
    shr.u32 %r1, %r0, 5; shl.b32 %r2, %r0, 2; mov.u32 %r3, smem; add.s32 %r4, %r3, %r2;
    st.shared.b32 [%r4], %r0;
    bar.sync 0;
    xor.b32 %r5, %r2, 384; add.s32 %r5, %r3, %r5; ld.shared.b32 %r9, [%r5];
"""


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_block_barrier(schedule: str) -> None:
    out = np.zeros(128, np.uint32)
    execute(BARRIER + STORE, out, threads=128, schedule=schedule, seed=3)
    assert np.array_equal(out, np.arange(128) ^ 96)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_named_barriers_that_differ_between_warps(schedule: str) -> None:
    """Two halves meet at their own barrier; a third warp pair only arrives."""
    out = np.zeros(128, np.uint32)
    body = f"""
        shr.u32 %r1, %r0, 6; add.s32 %r2, %r1, 1; mov.u32 %r3, smem;
        bar.sync %r2, 64;
        setp.eq.u32 %p1, %r1, 0; @%p1 bra FIRST;
        bar.sync 5, 128; ld.shared.b32 %r9, [%r3]; bra.uni OUT;
    FIRST:
        st.shared.b32 [%r3], 42; bar.arrive 5, 128; mov.b32 %r9, 1;
    OUT:
        {STORE}
    """
    execute(body, out, threads=128, schedule=schedule, seed=5)
    assert np.array_equal(out, np.repeat([1, 42], 64))


def test_deadlock_names_every_blocked_warp() -> None:
    body = """
        mov.u32 %r3, smem; setp.ne.u32 %p1, %r0, 0; @%p1 bra SKIP;
        mbarrier.init.shared.b64 [%r3], 2;
    SKIP:
        bar.sync 0;
        setp.gt.u32 %p2, %r0, 31; @%p2 bra BAR;
    LOOP:
        mbarrier.try_wait.parity.shared.b64 %p3, [%r3], 0; @%p3 bra OUT; bra LOOP;
    BAR:
        bar.sync 3, 64;
    OUT:
    """
    with pytest.raises(DeadlockError) as failure:
        execute(body, np.zeros(1, np.uint32), threads=64)
    text = str(failure.value)
    assert "warps [0]: waits for parity 0 of mbarrier 0x400" in text
    assert "pending 2 of 2" in text
    assert "mbarrier.try_wait.parity.shared.b64" in text
    assert "warps [1]: waits for barrier 3 (32 of 64 threads arrived)" in text


@pytest.mark.parametrize(
    "poll",
    [
        "mbarrier.test_wait.parity.shared.b64 %p3, [%r3], 0; nanosleep.u32 20;",
        "ld.acquire.gpu.global.b32 %r1, [%d0]; setp.ne.u32 %p3, %r1, 0;",
    ],
)
def test_poll_loops_end_in_a_deadlock_too(poll: str) -> None:
    body = f"""
        mov.u32 %r3, smem; elect.sync %r1|%p1, -1;
        @%p1 mbarrier.init.shared.b64 [%r3], 32;
    LOOP:
        {poll} @!%p3 bra LOOP;
    """
    with pytest.raises(DeadlockError):
        execute(body, np.zeros(1, np.uint32))


def test_ctas_that_wait_for_each_other_are_resident_together() -> None:
    flags = np.zeros(2, np.uint32)
    body = """
        mov.u32 %r1, %ctaid.x; mul.wide.u32 %d5, %r1, 4; add.s64 %d6, %d0, %d5;
        xor.b32 %r2, %r1, 1; mul.wide.u32 %d7, %r2, 4; add.s64 %d8, %d0, %d7;
        mov.b32 %r3, 1; st.release.gpu.global.b32 [%d6], %r3;
    LOOP:
        ld.acquire.gpu.global.b32 %r4, [%d8]; setp.eq.u32 %p1, %r4, 0; @%p1 bra LOOP;
    """
    for schedule in SCHEDULES:
        flags[:] = 0
        execute(body, flags, grid=2, schedule=schedule)
        assert flags.tolist() == [1, 1]


def test_mbarrier_counts_arrivals_and_bytes() -> None:
    out = np.zeros(32, np.uint32)
    body = f"""
        mov.u32 %r3, smem; mov.b32 %r9, 0; elect.sync %r1|%p1, -1; @!%p1 bra DONE;
        mbarrier.init.shared.b64 [%r3], 2;
        mbarrier.arrive.shared.b64 %d5, [%r3];
        mbarrier.arrive.expect_tx.shared.b64 _, [%r3], 64;
        mbarrier.test_wait.parity.shared.b64 %p2, [%r3], 1; selp.b32 %r9, 1, 0, %p2;
        mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r3], 64;
        mbarrier.try_wait.parity.shared.b64 %p3, [%r3], 0; selp.b32 %r4, 2, 0, %p3;
        add.s32 %r9, %r9, %r4;
    DONE:
        {STORE}
    """
    execute(body, out)
    assert out[0] == 3


def test_misuse_of_mbarriers() -> None:
    array = np.zeros(1, np.uint32)
    with pytest.raises(BarrierError, match=r"not initialised.*PTX line.*mbarrier\.arrive"):
        execute("mov.u32 %r3, smem; mbarrier.arrive.shared.b64 %d5, [%r3];", array)
    over = """
        mov.u32 %r3, smem; elect.sync %r1|%p1, -1; @!%p1 bra DONE;
        mbarrier.init.shared.b64 [%r3], 1; mbarrier.arrive.shared.b64 _, [%r3], 2;
    DONE:
    """
    with pytest.raises(BarrierError, match="more than its pending count"):
        execute(over, array)


def test_addresses_out_of_range() -> None:
    array = np.zeros(32, np.uint32)
    with pytest.raises(AddressError, match=r"past the end of array 0.*PTX line \d+: st\.global"):
        execute("add.s64 %d20, %d0, %d30; st.global.b32 [%d20+64], %r0;", array)
    with pytest.raises(AddressError, match="shared"):
        execute("mov.u32 %r1, smem; ld.shared.b32 %r2, [%r1+1000000];", array)
    with pytest.raises(AddressError, match="misaligned"):
        execute("ld.global.b32 %r2, [%d0+2];", array)


def test_unknown_instructions_name_their_line() -> None:
    array = np.zeros(1, np.uint32)
    for text in ("frobnicate.u32 %r1, %r0;", "add.sat.u7 %r1, %r0, 1;",
                 "ld.global.fancy.b32 %r1, [%d0];", "fence.unheard.of;",
                 "wgmma.mma_async.sp.sync.aligned.m64n8k32.f32.f16.f16 {%r1}, %d1, %d2, %p1, 1, 1;",
                 "cvt.rn.e4m3x2.f32 %h1, %r1, %r2;"):  # fmt: skip
        with pytest.raises(UnknownInstruction, match=r"PTX line \d+"):
            execute(text, array)


def test_shared_memory_starts_as_nan() -> None:
    out = np.zeros(32, np.uint32)
    execute(f"mov.u32 %r1, smem; ld.shared.b32 %r9, [%r1]; {STORE}", out)
    assert np.isnan(out.view(np.float32)).all()


def test_a_second_launch_reuses_the_program() -> None:
    kernel = kernel_of(f"mov.u32 %r9, %ctaid.x; mov.u32 %r8, %nctaid.x; "
                       f"mad.lo.s32 %r9, %r9, 10, %r8; {STORE}")  # fmt: skip
    out = np.zeros(32, np.uint32)
    execute(kernel, out, grid=3)
    program = kernel.program
    assert (out == 23).all()
    execute(kernel, out, grid=2)
    assert (out == 12).all()
    assert kernel.program is program


def test_launch_must_fit_the_kernel() -> None:
    text = ".version 8.8\n.target sm_90a\n.visible .entry k() .reqntid 64, 1, 1 { ret; }"
    kernel = parse_module(text).kernels["k"]
    with pytest.raises(EmulationError, match="reqntid"):
        execute(kernel, threads=32)


def test_counters() -> None:
    array = np.zeros(64, np.uint32)
    outcome = execute(
        "add.s64 %d20, %d0, %d30; ld.global.b32 %r1, [%d20]; ex2.approx.ftz.f32 %r2, %r1;"
        "st.global.b32 [%d20], %r2; setmaxnreg.dec.sync.aligned.u32 24;",
        array, threads=64, grid=2,
    )  # fmt: skip
    totals = outcome.counters.as_dict()
    assert totals["ctas"] == 2
    assert totals["global_load_bytes"] == totals["global_store_bytes"] == 2 * 64 * 4
    assert totals["mufu"] == 128
    assert totals["op:ex2"] == 4
    assert outcome.counters.registers_set == [24]
