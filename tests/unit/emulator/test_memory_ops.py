"""Loads, stores, atomics and matrix moves on hand-written kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hopperflash.emulator.errors import AddressError, UnknownInstruction
from tests.support.ptx import execute

RNG = np.random.default_rng(17)
SCHEDULES = ["eager", "lazy", "random"]


def words(n: int) -> np.ndarray:
    return RNG.integers(0, 2**32, n, dtype=np.uint32)


@pytest.mark.parametrize(
    "mods",
    ["", ".ca", ".cg", ".cs", ".lu", ".cv", ".nc", ".nc.L1::no_allocate", ".L1::evict_last",
     ".L2::128B", ".relaxed.gpu", ".volatile"],
)  # fmt: skip
def test_global_loads_with_modifiers(mods: str) -> None:
    head, _, order = mods.partition(".relaxed")
    opcode = (
        "ld.volatile.global"
        if mods == ".volatile"
        else f"ld{'.relaxed' + order if order else ''}.global{head}"
    )
    source, out = words(32), np.zeros(32, np.uint32)
    execute(
        f"add.s64 %d5, %d1, %d30; {opcode}.b32 %r9, [%d5];"
        "add.s64 %d6, %d0, %d30; st.global.b32 [%d6], %r9;", out, source,
    )  # fmt: skip
    assert np.array_equal(out, source)


@pytest.mark.parametrize(("vector", "bits"), [("", 8), ("", 16), ("", 64), (".v2", 32), (".v4", 32),
                                              (".v2", 64), (".v2", 16), (".v4", 8)])  # fmt: skip
@pytest.mark.parametrize("space", ["global", "shared", "local"])
def test_widths(space: str, vector: str, bits: int) -> None:
    count = int(vector[2:] or 1)
    nbytes = count * bits // 8
    bank = {8: "h", 16: "h", 32: "r", 64: "d"}[bits]
    first = 10
    names = ", ".join(f"%{bank}{first + i}" for i in range(count))
    group = f"{{{names}}}" if vector else names
    source, out = RNG.integers(0, 256, 32 * nbytes, dtype=np.uint8), np.zeros(32 * nbytes, np.uint8)
    through = ""
    if space == "shared":
        through = f"""
            mov.u32 %r3, smem; mad.lo.s32 %r4, %r0, {nbytes}, %r3;
            st.shared{vector}.b{bits} [%r4], {group}; ld.shared{vector}.b{bits} {group}, [%r4];
        """
    elif space == "local":
        through = f"""
            .local .align 16 .b8 mine[32];
            st.local{vector}.b{bits} [mine+16], {group};
            mov.u64 %d7, mine; cvta.local.u64 %d8, %d7;
            ld{vector}.b{bits} {group}, [%d8+16];
        """
    body = f"""
        mul.wide.u32 %d5, %r0, {nbytes}; add.s64 %d6, %d1, %d5; add.s64 %d9, %d0, %d5;
        ld.global{vector}.b{bits} {group}, [%d6]; {through}
        st.global{vector}.b{bits} [%d9], {group};
    """
    execute(body, out, source)
    assert np.array_equal(out, source)


def test_sign_extension_and_truncation() -> None:
    source = np.array([-1, -128, 127, 5] * 8, np.int8)
    out = np.zeros(32, np.int32)
    execute(
        "cvt.u64.u32 %d5, %r0; add.s64 %d6, %d1, %d5; ld.global.s8 %r9, [%d6];"
        "add.s64 %d7, %d0, %d30; st.global.b32 [%d7], %r9;", out, source,
    )  # fmt: skip
    assert np.array_equal(out, source)


def test_vectors_of_blackwell_are_refused() -> None:
    names = ", ".join(f"%r{i}" for i in range(10, 18))
    with pytest.raises(UnknownInstruction, match="v8"):
        execute(f"ld.global.v8.b32 {{{names}}}, [%d0];", np.zeros(64, np.uint32))


def test_generic_addresses_of_different_memories() -> None:
    """Lane by lane global, shared and local memory in one instruction."""
    source, out = words(32), np.zeros(32, np.uint32)
    body = """
        .local .align 16 .b8 mine[16];
        add.s64 %d5, %d1, %d30; ld.global.b32 %r9, [%d5]; st.local.b32 [mine], %r9;
        mov.u32 %r3, smem; shl.b32 %r4, %r0, 2; add.s32 %r4, %r4, %r3; st.shared.b32 [%r4], %r9;
        mov.u64 %d7, mine; cvta.local.u64 %d7, %d7; cvt.u64.u32 %d8, %r4;
        rem.u32 %r5, %r0, 3; setp.eq.u32 %p1, %r5, 0; setp.eq.u32 %p2, %r5, 1;
        selp.b64 %d9, %d7, %d8, %p1; selp.b64 %d9, %d5, %d9, %p2;
        ld.b32 %r10, [%d9]; add.s64 %d10, %d0, %d30; st.global.b32 [%d10], %r10;
    """
    execute(body, out, source)
    assert np.array_equal(out, source)


ATOMICS: dict[str, tuple[Any, Any]] = {
    "add.u32": (np.uint32, np.add), "add.f32": (np.float32, np.add),
    "add.s32": (np.int32, np.add), "add.u64": (np.uint64, np.add), "add.f64": (np.float64, np.add),
    **{f"{name}.{kind}": (np.dtype(kind.replace("s", "i")[0] + str(int(kind[1:]) // 8)), fn)
       for name, fn in (("min", np.minimum), ("max", np.maximum))
       for kind in ("u32", "s32", "u64", "s64")},
    **{f"{name}.b{8 * np.dtype(dtype).itemsize}": (dtype, fn)
       for name, fn in (("and", np.bitwise_and), ("or", np.bitwise_or), ("xor", np.bitwise_xor))
       for dtype in (np.uint32, np.uint64)},
}  # fmt: skip


@pytest.mark.parametrize("space", ["global", "shared"])
@pytest.mark.parametrize("kind", ["atom", "red"])
@pytest.mark.parametrize("name", ATOMICS)
def test_atomics_on_shared_words(name: str, kind: str, space: str) -> None:
    """Two lanes for each word."""
    dtype, fn = ATOMICS[name]
    size = np.dtype(dtype).itemsize
    bank = {4: "r", 8: "d"}[size]
    low = 0 if np.dtype(dtype).kind == "u" else -1000
    values = RNG.integers(low, 1000, 32).astype(dtype)
    start = RNG.integers(low, 1000, 16).astype(dtype)
    out = np.zeros(16, dtype)
    result = f"%{bank}12, " if kind == "atom" else ""
    body = f"""
        and.b32 %r4, %r0, 15; mul.wide.u32 %d5, %r4, {size}; mul.wide.u32 %d6, %r0, {size};
        add.s64 %d7, %d1, %d6; ld.global.b{8 * size} %{bank}10, [%d7];
        add.s64 %d8, %d2, %d5; ld.global.b{8 * size} %{bank}11, [%d8];
        add.s64 %d9, %d0, %d5; mov.u32 %r3, smem; mad.lo.s32 %r6, %r4, {size}, %r3;
        cvt.u64.u32 %d13, %r6;
        {"mov.b64 %d14, %d9" if space == "global" else "mov.b64 %d14, %d13"};
        st.{space}.b{8 * size} [%d14], %{bank}11; bar.sync 0;
        {kind}.relaxed.cta.{space}.{name} {result}[%d14], %{bank}10; bar.sync 0;
        ld.{space}.b{8 * size} %{bank}15, [%d14]; bar.sync 0;
        st.global.b{8 * size} [%d9], %{bank}15;
    """
    outcome = execute(body, out, values, start)
    assert np.array_equal(out, fn(fn(start, values[:16]), values[16:]))
    assert outcome.counters.global_atomic_bytes == (32 * size if space == "global" else 0)


def test_exchange_compare_and_wrap() -> None:
    cells, old = np.arange(4, dtype=np.uint32), np.zeros((4, 32), np.uint32)
    body = """
        add.s64 %d5, %d1, %d30;
        atom.global.exch.b32 %r10, [%d0], %r0; st.global.b32 [%d5], %r10;
        atom.global.cas.b32 %r11, [%d0+4], %r0, 77; st.global.b32 [%d5+128], %r11;
        atom.global.inc.u32 %r12, [%d0+8], 4; st.global.b32 [%d5+256], %r12;
        atom.global.dec.u32 %r13, [%d0+12], 5; st.global.b32 [%d5+384], %r13;
    """
    execute(body, cells, old)
    assert old[0].tolist() == [0, *range(31)] and cells[0] == 31
    assert cells[1] == 77 and old[1, :3].tolist() == [1, 1, 77]
    count, counts = 2, []
    for _ in range(32):
        counts.append(count)
        count = 0 if count >= 4 else count + 1
    assert old[2].tolist() == counts and cells[2] == count
    count, counts = 3, []
    for _ in range(32):
        counts.append(count)
        count = 5 if count == 0 or count > 5 else count - 1
    assert old[3].tolist() == counts and cells[3] == count


def test_vector_and_packed_reductions() -> None:
    floats = np.ones((32, 4), np.float32)
    execute(
        "mul.wide.u32 %d5, %r0, 16; add.s64 %d6, %d0, %d5; cvt.rn.f32.u32 %r10, %r0;"
        "red.global.add.v4.f32 [%d6], {%r10, %r10, %r10, %r10};", floats,
    )  # fmt: skip
    assert np.array_equal(floats, 1 + np.arange(32, dtype=np.float32)[:, None].repeat(4, 1))
    halves = np.full(64, 0.5, np.float16)
    execute(
        "add.s64 %d6, %d0, %d30; mov.b32 %r10, 0x40003C00;"
        "red.global.add.noftz.f16x2 [%d6], %r10;", halves,
    )  # fmt: skip
    assert halves.tolist() == [1.5, 2.5] * 32
    brain = np.full(64, 0x3F80, np.uint16)
    execute(
        "and.b32 %r1, %r0, 15; mul.wide.u32 %d5, %r1, 8; add.s64 %d6, %d0, %d5;"
        "mov.b32 %r10, 0x3F803F80; red.global.add.noftz.v2.bf16x2 [%d6], {%r10, %r10};", brain,
    )  # fmt: skip
    assert (brain == 0x4040).all()  # 1 + 1 + 1


# Sums of halves: type, registers of one, the bits of 1 and of 2 in each half.
HALVES = [
    ("f16", "h", 0x3C00, 0x4000),
    ("bf16", "h", 0x3F80, 0x4000),
    ("f16x2", "r", 0x3C003C00, 0x40004000),
    ("bf16x2", "r", 0x3F803F80, 0x40004000),
]


@pytest.mark.parametrize("space", ["global", "shared"])
@pytest.mark.parametrize(("kind", "bank", "one", "two"), HALVES)
def test_atomic_sums_of_halves(kind: str, bank: str, one: int, two: int, space: str) -> None:
    bits = {"h": 16, "r": 32}[bank]
    out = np.zeros((2, 32), f"u{bits // 8}")
    body = f"""
        mul.wide.u32 %d5, %r0, {bits // 8}; add.s64 %d6, %d0, %d5;
        mov.u32 %r3, smem; cvt.u64.u32 %d7, %r3; add.s64 %d7, %d7, %d5;
        {"mov.b64 %d14, %d6" if space == "global" else "mov.b64 %d14, %d7"};
        mov.b{bits} %{bank}10, {one};
        st.{space}.b{bits} [%d14], %{bank}10;
        atom.{space}.add.noftz.{kind} %{bank}11, [%d14], %{bank}10;
        ld.{space}.b{bits} %{bank}12, [%d14];
        st.global.b{bits} [%d6], %{bank}12; st.global.b{bits} [%d6+{4 * bits}], %{bank}11;
    """
    execute(body, out)
    assert (out[0] == two).all() and (out[1] == one).all()


@pytest.mark.parametrize("count", [2, 4])
def test_vector_atomics_return_what_was_there(count: int) -> None:
    cells = np.arange(32 * count, dtype=np.float32)
    old = np.zeros_like(cells)
    names = "{" + ", ".join(f"%r{10 + i}" for i in range(count)) + "}"
    ones = "{" + ", ".join(["%r20"] * count) + "}"
    body = f"""
        mul.wide.u32 %d5, %r0, {4 * count}; add.s64 %d6, %d0, %d5; add.s64 %d7, %d1, %d5;
        mov.b32 %r20, 0f3F800000; atom.global.add.v{count}.f32 {names}, [%d6], {ones};
        st.global.v{count}.f32 [%d7], {names};
    """
    execute(body, cells, old)
    assert np.array_equal(old, np.arange(32 * count)) and np.array_equal(cells, old + 1)


def test_wide_and_narrow_exchanges() -> None:
    cells, old = np.array([5, 7], np.uint64), np.zeros(2, np.uint64)
    execute(
        "mov.b64 %d5, 9; atom.global.exch.b64 %d6, [%d0], %d5; st.global.b64 [%d1], %d6;"
        "mov.b64 %d7, 7; atom.global.cas.b64 %d8, [%d0+8], %d7, %d5; st.global.b64 [%d1+8], %d8;",
        cells, old, threads=1,
    )  # fmt: skip
    assert cells.tolist() == [9, 9] and old.tolist() == [5, 7]
    halves = np.array([3, 4, 0], np.uint16)
    execute(
        "mov.b16 %h1, 4; mov.b16 %h2, 8; atom.global.cas.b16 %h3, [%d0+2], %h1, %h2;"
        "st.global.b16 [%d0+4], %h3;", halves, threads=1,
    )  # fmt: skip
    assert halves.tolist() == [3, 8, 4]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix_and_stmatrix(count: int, transposed: bool) -> None:
    """Matrix j has its row r at the address of lane 8j + r; here rows lie 16 bytes apart."""
    source = RNG.integers(0, 2**16, (count, 8, 8), dtype=np.uint16)
    fragments, back = np.zeros((count, 32, 2), np.uint16), np.zeros_like(source)
    names = ", ".join(f"%r{10 + i}" for i in range(count))
    trans = ".trans" if transposed else ""
    out = " ".join(f"st.global.b32 [%d7+{128 * i}], %r{10 + i};" for i in range(count))
    body = f"""
        mov.u32 %r3, smem; rem.u32 %r4, %r0, {8 * count}; shl.b32 %r5, %r4, 4;
        add.s32 %r6, %r3, %r5; cvt.u64.u32 %d5, %r5; add.s64 %d6, %d1, %d5;
        ld.global.v4.b32 {{%r20, %r21, %r22, %r23}}, [%d6];
        st.shared.v4.b32 [%r6], {{%r20, %r21, %r22, %r23}}; bar.sync 0;
        ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {{{names}}}, [%r6];
        add.s64 %d7, %d0, %d30; {out}
        stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 [%r6+1024], {{{names}}}; bar.sync 0;
        ld.shared.v4.b32 {{%r20, %r21, %r22, %r23}}, [%r6+1024];
        add.s64 %d8, %d2, %d5; st.global.v4.b32 [%d8], {{%r20, %r21, %r22, %r23}};
    """
    outcome = execute(body, fragments, source, back)
    for j in range(count):
        for lane in range(32):
            for half in range(2):
                row, column = lane // 4, 2 * (lane % 4) + half
                expected = source[j, column, row] if transposed else source[j, row, column]
                assert fragments[j, lane, half] == expected
    assert np.array_equal(back, source)
    assert outcome.counters.shared_bank_conflicts == 0


@pytest.mark.parametrize(
    ("stride", "extra"), [(4, 0), (8, 1), (16, 3), (128, 31), (132, 0), (0, 0)]
)
def test_bank_conflicts_of_words(stride: int, extra: int) -> None:
    """A stride of 2**n words reaches 32 / 2**n banks; one word for all is a broadcast."""
    body = f"mov.u32 %r3, smem; mad.lo.s32 %r4, %r0, {stride}, %r3; ld.shared.b32 %r9, [%r4];"
    outcome = execute(body, np.zeros(1, np.uint32))
    assert outcome.counters.shared_bank_conflicts == extra


def test_bank_conflicts_of_wide_accesses() -> None:
    body = """
        mov.u32 %r3, smem; mad.lo.s32 %r4, %r0, {}, %r3;
        ld.shared.v4.b32 {{%r5, %r6, %r7, %r8}}, [%r4];
    """
    for stride, extra in ((16, 0), (32, 4), (128, 28), (144, 0)):
        outcome = execute(body.format(stride), np.zeros(1, np.uint32))
        assert outcome.counters.shared_bank_conflicts == extra, stride


def test_ldmatrix_without_swizzle_conflicts() -> None:
    """Rows 128 bytes apart: the eight rows of a matrix fall on the same four banks."""
    body = """
        mov.u32 %r3, smem; and.b32 %r4, %r0, 7; shl.b32 %r5, %r4, 7; shr.u32 %r6, %r0, 3;
        shl.b32 %r6, %r6, 4; add.s32 %r7, %r3, %r5; add.s32 %r7, %r7, %r6;
        ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r10, %r11, %r12, %r13}, [%r7];
    """
    outcome = execute(body, np.zeros(1, np.uint32))
    assert outcome.counters.shared_bank_conflicts == 4 * 7


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_cp_async_may_ignore_its_source(schedule: str) -> None:
    source, out = words(128), np.full(128, 9, np.uint32)
    body = """
        mov.u32 %r3, smem; shl.b32 %r4, %r0, 4; add.s32 %r5, %r3, %r4; cvt.u64.u32 %d5, %r4;
        add.s64 %d6, %d1, %d5; and.b32 %r6, %r0, 1; setp.ne.u32 %p1, %r6, 0;
        cp.async.cg.shared.global.L2::128B [%r5], [%d6], 16, %p1; cp.async.wait_all;
        ld.shared.v4.b32 {%r20, %r21, %r22, %r23}, [%r5]; add.s64 %d7, %d0, %d5;
        st.global.v4.b32 [%d7], {%r20, %r21, %r22, %r23};
    """
    execute(body, out, source, schedule=schedule)
    expected = source.reshape(32, 4).copy()
    expected[1::2] = 0
    assert np.array_equal(out.reshape(32, 4), expected)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("mods", ["", ".noinc"])
def test_cp_async_arrives_at_an_mbarrier(mods: str, schedule: str) -> None:
    """Without .noinc the arrival raises the pending count first: thread 0 alone is expected."""
    source, out = words(128), np.zeros(128, np.uint32)
    count = 32 if mods else 1
    body = f"""
        mov.u32 %r3, smem; setp.ne.u32 %p2, %r0, 0; @%p2 bra READY;
        mbarrier.init.shared.b64 [%r3], {count};
    READY:
        bar.sync 0; shl.b32 %r4, %r0, 4; add.s32 %r5, %r3, %r4; cvt.u64.u32 %d5, %r4;
        add.s64 %d6, %d1, %d5; cp.async.cg.shared.global [%r5+64], [%d6], 16;
        cp.async.mbarrier.arrive{mods}.shared.b64 [%r3];
        {"" if mods else "bar.sync 0; @!%p2 mbarrier.arrive.shared.b64 _, [%r3];"}
    LOOP:
        mbarrier.try_wait.parity.shared.b64 %p3, [%r3], 0; @!%p3 bra LOOP;
        ld.shared.v4.b32 {{%r20, %r21, %r22, %r23}}, [%r5+64]; add.s64 %d7, %d0, %d5;
        st.global.v4.b32 [%d7], {{%r20, %r21, %r22, %r23}};
    """
    execute(body, out, source, schedule=schedule, seed=2)
    assert np.array_equal(out, source)


def test_unique_bytes_and_rereads() -> None:
    source, out = words(32), np.zeros(32, np.uint32)
    body = """
        ld.global.b32 %r9, [%d1+8]; add.s64 %d5, %d1, %d30; ld.global.b32 %r10, [%d5];
        add.s64 %d6, %d0, %d30; st.global.b32 [%d6], %r9; st.global.b32 [%d6], %r10;
    """
    counters = execute(body, out, source).counters
    assert counters.global_load_bytes == 256
    assert counters.unique_global_load_bytes == 128
    assert counters.global_reread_bytes == 128
    assert (counters.global_store_bytes, counters.unique_global_store_bytes) == (256, 128)


def test_reading_outside_of_memory_is_refused() -> None:
    with pytest.raises(AddressError, match="array 0"):
        execute("ld.global.b32 %r9, [%d0+4];", np.zeros(1, np.uint32))
    with pytest.raises(AddressError, match="shared"):
        execute("mov.u32 %r3, smem; ld.shared.b32 %r9, [%r3+65536];", np.zeros(1, np.uint32))
