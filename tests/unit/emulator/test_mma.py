"""mma.sync of every type: fragments by the PTX tables, products by integers or float64."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from hopperflash.emulator.element_types import from_float32, to_float32
from hopperflash.emulator.errors import UnknownInstruction
from tests.support.ptx import execute

RNG = np.random.default_rng(9)
ITEMSIZE = {"f16": 2, "bf16": 2, "tf32": 4, "s8": 1, "u8": 1, "e4m3": 1, "e5m2": 1}


def matrix(kind: str, rows: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Raw elements and their values: small integers, which every type holds exactly."""
    low = 0 if kind == "u8" else -6
    values = RNG.integers(low, 7, (rows, k)).astype(np.float32)
    if kind in ("s8", "u8"):
        return values.astype(np.int8).view(np.uint8), values
    if kind == "tf32":
        return values.view(np.uint32), values
    return from_float32(values, kind), values


def fragments(raw: np.ndarray, registers: int, at: Callable[[int, int, int], tuple[int, int]]):
    """Registers [count, 32] from (row, k) of each (register, lane, element)."""
    per = 4 // raw.itemsize
    words = np.zeros((registers, 32, per), raw.dtype)
    for j in range(registers):
        for lane in range(32):
            for e in range(per):
                words[j, lane, e] = raw[at(j, lane, e)]
    return np.ascontiguousarray(words).view(np.uint32)[..., 0]


def run(opcode: str, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """One instruction; operands and result are registers [count, 32]."""
    out = np.zeros_like(c)
    loads, names = [], []
    for pointer, (registers, first) in enumerate(((a, 10), (b, 20), (c, 30)), 1):
        loads.append(f"add.s64 %d20, %d{pointer}, %d30;")
        loads += [f"ld.global.b32 %r{first + j}, [%d20+{128 * j}];" for j in range(len(registers))]
        names.append(", ".join(f"%r{first + j}" for j in range(len(registers))))
    results = ", ".join(f"%r{40 + j}" for j in range(len(c)))
    stores = [f"st.global.b32 [%d21+{128 * j}], %r{40 + j};" for j in range(len(c))]
    body = "\n".join([
        *loads, f"{opcode} {{{results}}}, {{{names[0]}}}, {{{names[1]}}}, {{{names[2]}}};",
        "add.s64 %d21, %d0, %d30;", *stores,
    ])  # fmt: skip
    execute(body, out, a.copy(), b.copy(), c.copy())
    return out


def operands(k: int, a_type: str, b_type: str):
    per = 4 // ITEMSIZE[a_type]
    raw_a, a = matrix(a_type, 16, k)
    raw_b, b = matrix(b_type, 8, k)
    a_registers = fragments(
        raw_a, 16 * k * ITEMSIZE[a_type] // 128,
        lambda j, lane, e: (lane // 4 + 8 * (j % 2), 4 * per * (j // 2) + per * (lane % 4) + e),
    )  # fmt: skip
    b_registers = fragments(
        raw_b, 8 * k * ITEMSIZE[b_type] // 128,
        lambda j, lane, e: (lane // 4, 4 * per * j + per * (lane % 4) + e),
    )  # fmt: skip
    return a_registers, b_registers, a @ b.T


def result_at(j: int, lane: int) -> tuple[int, int]:
    return lane // 4 + 8 * (j // 2), 2 * (lane % 4) + j % 2


FLOATS = [
    (8, "f16", "f16"), (16, "f16", "f16"), (8, "bf16", "bf16"), (16, "bf16", "bf16"),
    (4, "tf32", "tf32"), (8, "tf32", "tf32"), (16, "e4m3", "e5m2"), (32, "e5m2", "e4m3"),
    (32, "e4m3", "e4m3"),
]  # fmt: skip


@pytest.mark.parametrize(("k", "a_type", "b_type"), FLOATS)
def test_float32_accumulators(k: int, a_type: str, b_type: str) -> None:
    a, b, product = operands(k, a_type, b_type)
    c = RNG.integers(-9, 9, (16, 8)).astype(np.float32)
    c_registers = np.array([[c[result_at(j, t)] for t in range(32)] for j in range(4)])
    opcode = f"mma.sync.aligned.m16n8k{k}.row.col.f32.{a_type}.{b_type}.f32"
    out = run(opcode, a, b, c_registers.view(np.uint32)).view(np.float32)
    for j in range(4):
        for lane in range(32):
            at = result_at(j, lane)
            assert out[j, lane] == product[at] + c[at]


@pytest.mark.parametrize(("k", "a_type"), [(8, "f16"), (16, "f16"), (32, "e4m3")])
def test_half_accumulators(k: int, a_type: str) -> None:
    a, b, product = operands(k, a_type, a_type)
    c = RNG.integers(-9, 9, (16, 8)).astype(np.float16)
    pairs = [[c[lane // 4 + 8 * j, 2 * (lane % 4) :][:2].view(np.uint32)[0] for lane in range(32)]
             for j in range(2)]  # fmt: skip
    opcode = f"mma.sync.aligned.m16n8k{k}.row.col.f16.{a_type}.{a_type}.f16"
    out = run(opcode, a, b, np.array(pairs, np.uint32))
    for j in range(2):
        for lane in range(32):
            for half in range(2):
                row, column = lane // 4 + 8 * j, 2 * (lane % 4) + half
                bits = np.uint16(out[j, lane] >> 16 * half & 0xFFFF)
                got = to_float32(np.array([bits], np.uint16), "f16")[0]
                assert got == np.float32(
                    np.float16(product[row, column] + np.float32(c[row, column]))
                )


@pytest.mark.parametrize("k", [16, 32])
@pytest.mark.parametrize("a_type", ["s8", "u8"])
@pytest.mark.parametrize("b_type", ["s8", "u8"])
def test_integer_accumulators(k: int, a_type: str, b_type: str) -> None:
    a, b, product = operands(k, a_type, b_type)
    c = RNG.integers(-(2**31), 2**31, (4, 32), dtype=np.int64).astype(np.int32)
    c[0] = 2**31 - 1
    for mods in ("", ".satfinite"):
        opcode = f"mma.sync.aligned.m16n8k{k}.row.col{mods}.s32.{a_type}.{b_type}.s32"
        out = run(opcode, a, b, c.view(np.uint32)).view(np.int32)
        for j in range(4):
            for lane in range(32):
                exact = int(product[result_at(j, lane)]) + int(c[j, lane])
                wrapped = (exact + 2**31) % 2**32 - 2**31
                assert out[j, lane] == (min(max(exact, -(2**31)), 2**31 - 1) if mods else wrapped)


@pytest.mark.parametrize(
    "shape",
    ["m16n8k16.row.col.f32.f16.bf16.f32", "m16n8k32.row.col.f32.f16.f16.f32",
     "m16n8k16.row.col.f16.bf16.bf16.f16", "m8n8k4.row.col.f64.f64.f64.f64",
     "m16n8k32.row.col.f32.s8.s8.f32"],
)  # fmt: skip
def test_what_does_not_exist_is_refused(shape: str) -> None:
    registers = np.zeros((4, 32), np.uint32)
    with pytest.raises(UnknownInstruction, match="mma"):
        run(f"mma.sync.aligned.{shape}", registers, registers[:2], registers)
