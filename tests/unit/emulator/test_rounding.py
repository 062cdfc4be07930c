"""Floating-point arithmetic and its rounding modes against exact fractions."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.ptx import apply

RNG = np.random.default_rng(11)
MODES = ["rn", "rz", "rm", "rp"]


def wide_range(n: int = 32) -> NDArray[np.float32]:
    exponents = RNG.integers(-20, 20, n).astype(np.float32)
    return (RNG.standard_normal(n) * 2.0**exponents).astype(np.float32)


def rounded(exact: Fraction, mode: str, kind: Any = np.float32) -> Any:
    """The value of a format that a rounding mode picks, by trying its neighbours."""
    near = kind(float(exact))
    around = [np.nextafter(near, kind(-np.inf)), near, np.nextafter(near, kind(np.inf))]
    below = [v for v in around if Fraction(float(v)) <= exact]
    above = [v for v in around if Fraction(float(v)) >= exact]
    if mode == "rz":
        mode = "rm" if exact >= 0 else "rp"
    if mode == "rm":
        return below[-1]
    if mode == "rp":
        return above[0]
    low, high = below[-1], above[0]
    distances = exact - Fraction(float(low)), Fraction(float(high)) - exact
    if distances[0] != distances[1]:
        return low if distances[0] < distances[1] else high
    even = f"u{np.dtype(kind).itemsize}"
    return low if int(np.array(low).view(even)) % 2 == 0 else high


EXACT = {
    "add": lambda a, b, c: a + b,
    "sub": lambda a, b, c: a - b,
    "mul": lambda a, b, c: a * b,
    "fma": lambda a, b, c: a * b + c,
    "div": lambda a, b, c: a / b,
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", EXACT)
def test_float32_rounds_as_told(name: str, mode: str) -> None:
    a, b, c = wide_range(), wide_range(), wide_range()
    sources = (a, b, c) if name == "fma" else (a, b)
    result = apply(f"{name}.{mode}.f32", *sources, dtype=np.float32)
    for x, y, z, r in zip(a, b, c, result, strict=True):
        exact = EXACT[name](*(Fraction(float(v)) for v in (x, y, z)))
        assert r == rounded(exact, mode)


def test_fma_rounds_once_where_float64_would_round_twice() -> None:
    """1 + 2**-24 + 2**-54: the nearest float64 is a float32 tie, the exact sum lies above it."""
    a = np.full(32, (1 + 2.0**-10) * 2.0**-12, np.float32)
    b = np.full(32, (1 - 2.0**-10 + 2.0**-20) * 2.0**-12, np.float32)
    one = np.ones(32, np.float32)
    result = apply("fma.rn.f32", a, b, one, dtype=np.float32)
    assert (result == np.float32(1 + 2.0**-23)).all()
    assert (apply("fma.rn.f32", a, -b, -one, dtype=np.float32) == -result).all()


def test_float64_fma_rounds_once() -> None:
    a = np.full(32, 1 + 2.0**-30)
    result = apply("fma.rn.f64", a, a, np.full(32, -(1 + 2.0**-29)), dtype=np.float64)
    assert (result == 2.0**-60).all()


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_16_bit_fma_rounds_once(kind: str) -> None:
    def widen(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
        if kind == "f16":
            return bits.view(np.float16).astype(np.float32)
        return (bits.astype(np.uint32) << 16).view(np.float32)

    step = 0x0801 if kind == "f16" else 0x0101
    a, b, c = ((RNG.integers(0, 0x400, 32) * 7 + 0x3800 + i * step).astype(np.uint16)
               for i in range(3))  # fmt: skip
    result = widen(apply(f"fma.rn.{kind}", a, b, c, dtype=np.uint16))
    for x, y, z, r in zip(widen(a), widen(b), widen(c), result, strict=True):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        if kind == "f16":
            assert np.float16(r) == rounded(exact, "rn", np.float16)
        else:
            error = abs(Fraction(float(r)) - exact)
            assert error <= Fraction(float(abs(r))) / 256


def test_16_bit_fma_rounds_once_where_float32_would_round_twice() -> None:
    """1 + 2**-11 + 2**-26: the nearest float32 is a float16 tie, the exact sum lies above it."""
    a = np.full(32, (1 + 2.0**-5) * 2.0**-6, np.float16)
    b = np.full(32, (1 - 2.0**-5 + 2.0**-10) * 2.0**-5, np.float16)
    operands = (x.view(np.uint16) for x in (a, b, np.ones(32, np.float16)))
    result = apply("fma.rn.f16", *operands, dtype=np.uint16).view(np.float16)
    assert (result == np.float16(1 + 2.0**-10)).all()


@pytest.mark.parametrize("mode", MODES)
def test_integers_become_floats(mode: str) -> None:
    values = RNG.integers(-(2**63), 2**63 - 1, 32, dtype=np.int64)
    result = apply(f"cvt.{mode}.f32.s64", values, dtype=np.float32)
    for v, r in zip(values, result, strict=True):
        assert r == rounded(Fraction(int(v)), mode)
    small = RNG.integers(2**24, 2**32 - 1, 32, dtype=np.uint32)
    result = apply(f"cvt.{mode}.f32.u32", small, dtype=np.float32)
    for v, r in zip(small, result, strict=True):
        assert r == rounded(Fraction(int(v)), mode)


@pytest.mark.parametrize("mode", MODES)
def test_float64_narrows(mode: str) -> None:
    values = RNG.standard_normal(32)
    result = apply(f"cvt.{mode}.f32.f64", values, dtype=np.float32)
    for v, r in zip(values, result, strict=True):
        assert r == rounded(Fraction(float(v)), mode)


def test_packed_halves() -> None:
    a, b = (RNG.standard_normal(64).astype(np.float16) for _ in range(2))
    pairs = apply("add.f16x2", a.view(np.uint32), b.view(np.uint32), dtype=np.uint32)
    assert np.array_equal(pairs.view(np.float16), a + b)
    sums = apply("mul.rn.sat.f16x2", a.view(np.uint32), b.view(np.uint32), dtype=np.uint32)
    assert np.array_equal(sums.view(np.float16), np.clip(a * b, 0, 1))
    less = apply("min.f16x2", a.view(np.uint32), b.view(np.uint32), dtype=np.uint32)
    assert np.array_equal(less.view(np.float16), np.minimum(a, b))
    negative = np.full(32, np.float32(-1).astype(np.float16)).view(np.uint16)
    one, nan = np.full(32, 0x3C00, np.uint16), np.full(32, 0x7E00, np.uint16)
    assert (apply("fma.rn.relu.f16", negative, one, negative, dtype=np.uint16) == 0).all()
    result = apply("fma.rn.relu.f16", nan, one, one, dtype=np.uint16)
    assert np.isnan(result.view(np.float16)).all()


def test_subnormals_are_flushed_only_where_asked() -> None:
    tiny = np.full(32, 2.0**-130, np.float32)
    one = np.ones(32, np.float32)
    assert (apply("mul.rn.f32", tiny, one, dtype=np.float32) == tiny).all()
    assert (apply("mul.rn.ftz.f32", tiny, one, dtype=np.float32) == 0).all()
    zero = np.zeros(32, np.float32)
    assert apply("setp.gt.f32", tiny, zero, dtype=np.bool_).all()
    assert not apply("setp.gt.ftz.f32", tiny, zero, dtype=np.bool_).any()
