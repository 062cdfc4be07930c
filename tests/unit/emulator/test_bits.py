"""Bit, byte and 24-bit opcodes against Python integers."""

from __future__ import annotations

import numpy as np
import pytest

from hopperflash.emulator.memory import LOCAL_BASE
from tests.support.ptx import apply

RNG = np.random.default_rng(3)


def words() -> np.ndarray:
    return RNG.integers(0, 2**32, 32, dtype=np.uint32)


def signed(value: int, bits: int) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


@pytest.mark.parametrize("a_type", ["u32", "s32"])
@pytest.mark.parametrize("b_type", ["u32", "s32"])
def test_dot_products(a_type: str, b_type: str) -> None:
    a, b, c = words(), words(), words()

    def parts(word: int, bits: int, kind: str, count: int, first: int = 0) -> list[int]:
        raw = [word >> bits * (first + i) & ((1 << bits) - 1) for i in range(count)]
        return [signed(v, bits) if kind == "s32" else v for v in raw]

    for opcode, bits, count, first in (
        ("dp4a", 8, 4, 0), ("dp2a.lo", 16, 2, 0), ("dp2a.hi", 16, 2, 2),
    ):  # fmt: skip
        result = apply(f"{opcode}.{a_type}.{b_type}", a, b, c, dtype=np.uint32)
        for x, y, z, r in zip(a, b, c, result, strict=True):
            left = parts(int(x), bits, a_type, count)
            right = parts(int(y), 8, b_type, count, first)
            total = int(z) + sum(i * j for i, j in zip(left, right, strict=True))
            assert r == total % (1 << 32), opcode


# The eight bytes of {b, a} that a mode picks, by PTX table, for control values 0 to 3.
MODES = {
    "f4e": ("3210", "4321", "5432", "6543"),
    "b4e": ("5670", "6701", "7012", "0123"),
    "rc8": ("0000", "1111", "2222", "3333"),
    "ecl": ("3210", "3211", "3222", "3333"),
    "ecr": ("0000", "1110", "2210", "3210"),
    "rc16": ("1010", "3232", "1010", "3232"),
}


@pytest.mark.parametrize("mode", MODES)
def test_permutation_modes(mode: str) -> None:
    a, b = words(), words()
    control = np.arange(32, dtype=np.uint32) % 4
    result = apply(f"prmt.b32.{mode}", a, b, control, dtype=np.uint32)
    for x, y, c, r in zip(a, b, control, result, strict=True):
        pair = int(y) << 32 | int(x)
        picked = [int(digit) for digit in MODES[mode][int(c)]]
        expected = 0
        for byte in picked:
            expected = expected << 8 | (pair >> 8 * byte & 255)
        assert r == expected


def test_masks_and_sign_extension() -> None:
    position = np.arange(32, dtype=np.uint32)
    width = RNG.integers(0, 40, 32, dtype=np.uint32)
    masks = apply("bmsk.clamp.b32", position, width, dtype=np.uint32)
    for p, n, r in zip(position, width, masks, strict=True):
        assert r == (((1 << min(int(n), 32)) - 1) << int(p)) % (1 << 32)
    values = words().view(np.int32)
    result = apply("szext.clamp.s32", values, width, dtype=np.int32)
    for v, n, r in zip(values, width, result, strict=True):
        assert r == (signed(int(v), min(int(n), 32)) if n else 0)
    result = apply("szext.wrap.u32", values.view(np.uint32), width, dtype=np.uint32)
    for v, n, r in zip(values.view(np.uint32), width, result, strict=True):
        assert r == int(v) & ((1 << (int(n) & 31)) - 1)


def test_leading_bits() -> None:
    values = words()
    values[:2] = 0, 1
    found = apply("bfind.shiftamt.u32", values, dtype=np.uint32)
    for v, r in zip(values, found, strict=True):
        assert r == (32 - int(v).bit_length() if v else 0xFFFFFFFF)


def test_integer_extras() -> None:
    a, b, c = words().view(np.int32), words().view(np.int32), words().view(np.int32)
    total = apply("add.sat.s32", a, b, dtype=np.int32)
    exact = a.astype(np.int64) + b
    assert np.array_equal(total, np.clip(exact, -(2**31), 2**31 - 1))
    distance = apply("sad.s32", a, b, c.view(np.uint32), dtype=np.uint32)
    difference = np.abs(a.astype(np.int64) - b)
    assert np.array_equal(distance, ((difference + c.view(np.uint32)) % 2**32).astype(np.uint32))
    low = apply("mul24.lo.s32", a, b, dtype=np.int32)
    for x, y, r in zip(a, b, low, strict=True):
        assert signed(signed(int(x), 24) * signed(int(y), 24), 32) == r
    pairs = apply("max.s16x2", a.view(np.uint32), b.view(np.uint32), dtype=np.uint32)
    assert np.array_equal(pairs.view(np.int16), np.maximum(a.view(np.int16), b.view(np.int16)))


def test_value_and_address_tests() -> None:
    x = np.array([0.0, 1.0, np.inf, np.nan, 2.0**-130, -1.5, -np.inf, 3.0] * 4, np.float32)
    table = {
        "finite": np.isfinite(x), "infinite": np.isinf(x), "notanumber": np.isnan(x),
        "subnormal": x == np.float32(2.0**-130),
        "normal": np.isfinite(x) & (np.abs(x) >= 1),
    }  # fmt: skip
    for name, expected in table.items():
        assert np.array_equal(apply(f"testp.{name}.f32", x, dtype=np.bool_), expected), name
    addresses = np.array([1024, 1 << 25, 1 << 40, LOCAL_BASE + 8] * 8, np.int64)
    for space, expected in (
        ("shared", [1, 0, 0, 0]), ("shared::cluster", [1, 1, 0, 0]),
        ("global", [0, 0, 1, 0]), ("local", [0, 0, 0, 1]),
    ):  # fmt: skip
        result = apply(f"isspacep.{space}", addresses, dtype=np.bool_)
        assert result.tolist() == [bool(v) for v in expected] * 8
