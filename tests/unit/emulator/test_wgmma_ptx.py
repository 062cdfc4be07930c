"""One-tile GEMMs in PTX: every input type, accumulator, layout and swizzle of wgmma.

The test places the operands in shared memory by the tables of the PTX ISA and computes the product
from small integers, which every type holds exactly.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest

from hopperflash.emulator.element_types import from_float32, to_float32
from hopperflash.emulator.errors import EmulationError
from tests.support.ptx import execute

RNG = np.random.default_rng(21)
ITEMSIZE = {"f16": 2, "bf16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1, "s8": 1, "u8": 1}
BASE = 1024
B_OFFSET = 16384
LAYOUT_CODE = {0: 0, 128: 1, 64: 2, 32: 3}


class Layout(NamedTuple):
    """Where an operand's elements lie, as a matrix descriptor says it."""

    swizzle: int
    mn_major: bool
    lbo: int
    sbo: int

    @staticmethod
    def of(swizzle: int, mn_major: bool, rows: int) -> Layout:
        width = max(swizzle // 16, 1)
        if not mn_major:
            return Layout(swizzle, False, 16 if swizzle else 8 * 16 * rows // 8, 8 * 16 * width)
        if swizzle:
            return Layout(swizzle, True, 2 * 8 * 16 * width, 8 * 16 * width)
        return Layout(0, True, 16 * rows * 8 // 8, 128)

    def descriptor(self, start: int) -> int:
        code = LAYOUT_CODE[self.swizzle] << 62
        return start >> 4 | (self.lbo >> 4) << 16 | (self.sbo >> 4) << 32 | code

    def offset(self, row: int, k: int, itemsize: int) -> int:
        """Byte of an element behind the start, before the swizzle."""
        t, width = 16 // itemsize, max(self.swizzle // 16, 1)
        if self.mn_major and self.swizzle:
            inner = row % t * itemsize + row // t % width * 16 + row // (t * width) * self.lbo
            return inner + k % 8 * 16 * width + k // 8 * self.sbo
        if self.mn_major:
            return row % t * itemsize + row // t * self.sbo + k % 8 * 16 + k // 8 * self.lbo
        step = 16 if self.swizzle else self.lbo
        return row % 8 * 16 * width + row // 8 * self.sbo + k // t * step + k % t * itemsize

    def place(self, image: np.ndarray, start: int, raw: np.ndarray) -> None:
        """Writes raw[row, k] into a picture of shared memory."""
        bits = {0: 0, 32: 1, 64: 2, 128: 3}[self.swizzle]
        for (row, k), element in np.ndenumerate(raw):
            address = start + self.offset(row, k, raw.itemsize)
            address ^= (address >> 7 & ((1 << bits) - 1)) << 4
            at = address - BASE
            image[at : at + raw.itemsize] = np.frombuffer(element.tobytes(), np.uint8)


def matrix(kind: str, rows: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Raw elements and their values."""
    low = 0 if kind == "u8" else -3
    values = RNG.integers(low, 4, (rows, k)).astype(np.float32)
    if kind in ("s8", "u8"):
        return values.astype(np.int8).view(np.uint8), values
    return (values.view(np.uint32) if kind == "tf32" else from_float32(values, kind)), values


def a_registers(raw: np.ndarray) -> np.ndarray:
    """The A fragment [4, 128] of a [64, k] matrix."""
    per = 4 // raw.itemsize
    words = np.zeros((4, 128, per), raw.dtype)
    for j in range(4):
        for t in range(128):
            row = 16 * (t // 32) + t % 32 // 4 + 8 * (j % 2)
            k = 4 * per * (j // 2) + per * (t % 4)
            words[j, t] = raw[row, k : k + per]
    return np.ascontiguousarray(words).view(np.uint32)[..., 0]


class Tile(NamedTuple):
    """What one instruction is told beside its operands."""

    n: int
    types: str
    tail: str
    """scale-d, scales and transposes as they stand in the operand list."""
    a_in_registers: bool = False
    accumulate: bool = True
    half: bool = False
    mods: str = ""

    @property
    def k(self) -> int:
        return 32 // ITEMSIZE[self.types.split(".")[1]]

    @property
    def registers(self) -> int:
        return self.n // 4 if self.half else self.n // 2


def kernel(tile: Tile, a_descriptor: int, b_descriptor: int) -> str:
    d = [f"%r{100 + i}" for i in range(tile.registers)]
    loads = [f"ld.global.b32 {name}, [%d21+{512 * i}];" for i, name in enumerate(d)]
    stores = [f"st.global.b32 [%d22+{512 * i}], {name};" for i, name in enumerate(d)]
    a = "%d6"
    if tile.a_in_registers:
        a = "{%r10, %r11, %r12, %r13}"
        loads += [f"ld.global.b32 %r{10 + j}, [%d23+{512 * j}];" for j in range(4)]
    return f"""
        mov.u32 %r3, smem; shl.b32 %r4, %r0, 4; add.s32 %r5, %r3, %r4;
        mul.wide.u32 %d5, %r0, 16; add.s64 %d5, %d5, %d1; mov.b32 %r6, 0;
    FILL:
        ld.global.v4.b32 {{%r20, %r21, %r22, %r23}}, [%d5];
        st.shared.v4.b32 [%r5], {{%r20, %r21, %r22, %r23}};
        add.s64 %d5, %d5, 2048; add.s32 %r5, %r5, 2048; add.s32 %r6, %r6, 1;
        setp.lt.u32 %p1, %r6, 16; @%p1 bra FILL;
        fence.proxy.async.shared::cta; bar.sync 0;
        add.s64 %d21, %d2, %d30; add.s64 %d22, %d0, %d30; add.s64 %d23, %d3, %d30;
        {" ".join(loads)}
        mov.b64 %d6, {a_descriptor}; mov.b64 %d7, {b_descriptor};
        setp.{"ge" if tile.accumulate else "lt"}.u32 %p5, %r0, 0;
        wgmma.fence.sync.aligned;
        wgmma.mma_async.sync.aligned.m64n{tile.n}k{tile.k}.{tile.types}{tile.mods}
            {{{", ".join(d)}}}, {a}, %d7, %p5{tile.tail};
        wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;
        {" ".join(stores)}
    """


def run(tile: Tile, a_layout: Layout, b_layout: Layout, c: np.ndarray) -> tuple[np.ndarray, ...]:
    """Result registers, and the values of A and B."""
    _, a_type, b_type = tile.types.split(".")
    raw_a, a = matrix(a_type, 64, tile.k)
    raw_b, b = matrix(b_type, tile.n, tile.k)
    image = np.zeros(32768, np.uint8)
    a_layout.place(image, BASE, raw_a)
    b_layout.place(image, BASE + B_OFFSET, raw_b)
    out = np.zeros_like(c)
    body = kernel(tile, a_layout.descriptor(BASE), b_layout.descriptor(BASE + B_OFFSET))
    outcome = execute(
        body, out, image, c, a_registers(raw_a), threads=128, schedule="lazy", shared_bytes=32768
    )
    assert outcome.hazards == []
    shape = f"m64n{tile.n}k{tile.k}.{tile.types}"
    assert outcome.counters.shapes == {f"wgmma:{shape}": 1}
    assert outcome.counters.wgmma_flops == 2 * 64 * tile.n * tile.k
    return out, a, b


def accumulator(values: np.ndarray) -> np.ndarray:
    """Registers [n/2, 128] of a [64, n] matrix."""
    n = values.shape[1]
    registers = np.zeros((n // 2, 128), values.dtype)
    for i in range(n // 2):
        for t in range(128):
            row = 16 * (t // 32) + t % 32 // 4 + 8 * (i // 2 % 2)
            registers[i, t] = values[row, 8 * (i // 4) + 2 * (t % 4) + i % 2]
    return registers


def check(tile: Tile, a_layout: Layout, b_layout: Layout, sign: int = 1) -> None:
    c = RNG.integers(-5, 5, (64, tile.n)).astype(np.float32)
    out, a, b = run(tile, a_layout, b_layout, accumulator(c).view(np.uint32))
    expected = sign * (a @ b.T) + (c if tile.accumulate else 0)
    assert np.array_equal(out.view(np.float32), accumulator(expected))


K_MAJOR = Layout.of(32, False, 64)
FLOATS = ["f16.f16", "bf16.bf16", "tf32.tf32", "e4m3.e4m3", "e4m3.e5m2", "e5m2.e4m3", "e5m2.e5m2"]


def tail_of(types: str, transposes: str = ", 0, 0") -> str:
    return ", 1, 1" + (transposes if "f16" in types.split(".")[1] else "")


@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize("types", FLOATS)
def test_k_major_inputs(types: str, swizzle: int) -> None:
    layout_a, layout_b = Layout.of(swizzle, False, 64), Layout.of(swizzle, False, 24)
    check(Tile(24, f"f32.{types}", tail_of(types)), layout_a, layout_b)


@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize("types", ["f16.f16", "bf16.bf16"])
@pytest.mark.parametrize(("a_mn", "b_mn"), [(True, False), (False, True), (True, True)])
def test_mn_major_inputs(types: str, swizzle: int, a_mn: bool, b_mn: bool) -> None:
    layouts = Layout.of(swizzle, a_mn, 64), Layout.of(swizzle, b_mn, 64)
    tail = tail_of(types, f", {int(a_mn)}, {int(b_mn)}")
    check(Tile(64, f"f32.{types}", tail), *layouts)


@pytest.mark.parametrize("types", FLOATS)
def test_a_in_registers(types: str) -> None:
    tail = tail_of(types, ", 0")
    check(Tile(16, f"f32.{types}", tail, a_in_registers=True), K_MAJOR, Layout.of(32, False, 16))


@pytest.mark.parametrize("n", range(8, 257, 8))
def test_widths(n: int) -> None:
    check(Tile(n, "f32.bf16.bf16", ", 1, 1, 0, 0"), K_MAJOR, Layout.of(32, False, n))


def test_scale_d_and_negation() -> None:
    layout = Layout.of(32, False, 16)
    check(Tile(16, "f32.f16.f16", ", 1, 1, 0, 0", accumulate=False), K_MAJOR, layout)
    check(Tile(16, "f32.f16.f16", ", -1, 1, 0, 0"), K_MAJOR, layout, sign=-1)
    check(Tile(16, "f32.f16.f16", ", -1, -1, 0, 0"), K_MAJOR, layout)


@pytest.mark.parametrize("types", ["f16.f16", "e4m3.e5m2"])
def test_half_accumulators(types: str) -> None:
    n = 16
    c = RNG.integers(-5, 5, (64, n)).astype(np.float16)

    def packed(values: np.ndarray) -> np.ndarray:
        registers = np.zeros((n // 4, 128), np.uint32)
        words = np.ascontiguousarray(values.astype(np.float16)).view(np.uint32)
        for i in range(n // 4):
            for t in range(128):
                row = 16 * (t // 32) + t % 32 // 4 + 8 * (i % 2)
                registers[i, t] = words[row, 4 * (i // 2) + t % 4]
        return registers

    tile = Tile(n, f"f16.{types}", tail_of(types), half=True)
    out, a, b = run(tile, K_MAJOR, Layout.of(32, False, n), packed(c))
    assert np.array_equal(out, packed(a @ b.T + c.astype(np.float32)))


@pytest.mark.parametrize("mods", ["", ".satfinite"])
@pytest.mark.parametrize("types", ["s8.s8", "u8.u8", "u8.s8", "s8.u8"])
def test_integers(types: str, mods: str) -> None:
    c = RNG.integers(-(2**20), 2**20, (64, 16)).astype(np.int32)
    c[:8], c[8:16] = 2**31 - 1, -(2**31)
    tile = Tile(16, f"s32.{types}", "", mods=mods)
    out, a, b = run(tile, K_MAJOR, Layout.of(32, False, 16), accumulator(c).view(np.uint32))
    exact = (a @ b.T).astype(np.int64) + c
    assert exact.max() > 2**31 - 1
    expected = exact.clip(-(2**31), 2**31 - 1) if mods else (exact + 2**31) % 2**32 - 2**31
    assert np.array_equal(out.view(np.int32), accumulator(expected))


def test_halves_round_once_to_the_accumulator() -> None:
    """float16 accumulators take one rounding of the float32 sum."""
    values = np.float32([1 + 2.0**-11, 2.0**-12])
    assert from_float32(values, "f16")[0] == from_float32(np.float32([1.0]), "f16")[0]
    assert to_float32(from_float32(values, "f16"), "f16")[1] == 2.0**-12


@pytest.mark.parametrize(
    "opcode",
    ["m64n16k16.f32.f16.bf16", "m64n12k16.f32.f16.f16", "m64n16k8.f32.f16.f16",
     "m64n264k16.f32.f16.f16", "m64n16k16.f16.bf16.bf16", "m64n16k16.s32.f16.f16",
     "m64n16k16.f32.f16.f16.satfinite"],
)  # fmt: skip
def test_shapes_that_do_not_exist_are_refused(opcode: str) -> None:
    d = ", ".join(f"%r{100 + i}" for i in range(8))
    body = f"""
        mov.b64 %d6, 0; setp.ge.u32 %p5, %r0, 0;
        wgmma.mma_async.sync.aligned.{opcode} {{{d}}}, %d6, %d6, %p5, 1, 1, 0, 0;
    """
    with pytest.raises(EmulationError, match="wgmma"):
        execute(body, np.zeros(1, np.uint32), threads=128)
