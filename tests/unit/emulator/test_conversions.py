"""cvt to and from narrow floats against torch, and its rounding and saturation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.ptx import apply

torch = pytest.importorskip("torch")

RNG = np.random.default_rng(5)
FLOAT8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}


def spread() -> NDArray[np.float32]:
    values = (RNG.standard_normal(32) * 2.0 ** RNG.integers(-12, 12, 32)).astype(np.float32)
    values[:6] = 0.0, -0.0, 1e9, -1e9, np.inf, 2.0**-10
    return values


def as_float8(x: NDArray[np.float32], kind: str) -> NDArray[np.uint8]:
    """The codes of saturated values by torch, which rounds to nearest even."""
    bounded = torch.from_numpy(x).clamp(-LARGEST[kind], LARGEST[kind])
    codes: NDArray[np.uint8] = bounded.to(FLOAT8[kind]).view(torch.uint8).numpy()
    return codes


@pytest.mark.parametrize("kind", FLOAT8)
def test_float8_from_float32(kind: str) -> None:
    low, high = spread(), spread()
    packed = apply(f"cvt.rn.satfinite.{kind}x2.f32", high, low, dtype=np.uint16)
    assert np.array_equal(packed & 0xFF, as_float8(low, kind))
    assert np.array_equal(packed >> 8, as_float8(high, kind))
    packed = apply(f"cvt.rn.satfinite.relu.{kind}x2.f32", high, low, dtype=np.uint16)
    assert np.array_equal(packed & 0x7F, as_float8(np.maximum(low, 0), kind) & 0x7F)
    nan = np.full(32, np.nan, np.float32)
    packed = apply(f"cvt.rn.satfinite.{kind}x2.f32", nan, low, dtype=np.uint16)
    assert (packed >> 8 == 0x7F).all()


@pytest.mark.parametrize("kind", FLOAT8)
def test_float8_from_and_to_halves(kind: str) -> None:
    halves = np.clip(RNG.standard_normal(64) * 50, -300, 300).astype(np.float16)
    packed = apply(f"cvt.rn.satfinite.{kind}x2.f16x2", halves.view(np.uint32), dtype=np.uint16)
    assert np.array_equal(packed.view(np.uint8), as_float8(halves.astype(np.float32), kind))
    back = apply(f"cvt.rn.f16x2.{kind}x2", packed, dtype=np.uint32).view(np.float16)
    expected = torch.from_numpy(packed.view(np.uint8)).view(FLOAT8[kind]).half().numpy()
    assert np.array_equal(back, expected)


def test_tf32() -> None:
    x = np.full(32, np.float32(1 + 2.0**-11), np.float32)
    assert (apply("cvt.rna.tf32.f32", x, dtype=np.float32) == 1 + 2.0**-10).all()
    assert (apply("cvt.rn.tf32.f32", x, dtype=np.float32) == 1).all()
    assert (apply("cvt.rz.tf32.f32", x + np.float32(2.0**-12), dtype=np.float32) == 1).all()


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_directed_rounding_of_halves(kind: str) -> None:
    x = RNG.standard_normal(32).astype(np.float32)

    def rounded(mode: str) -> NDArray[np.float32]:
        bits = apply(f"cvt.{mode}.{kind}.f32", x, dtype=np.uint16)
        if kind == "f16":
            return bits.view(np.float16).astype(np.float32)
        return (bits.astype(np.uint32) << 16).view(np.float32)

    down, up, nearest, zero = (rounded(mode) for mode in ("rm", "rp", "rn", "rz"))
    assert (down < x).all() and (up > x).all()
    assert np.array_equal(zero, np.where(x > 0, down, up))
    assert np.array_equal(nearest, np.where(x - down < up - x, down, up))
    ulp = np.abs(x) * (2.0**-9 if kind == "f16" else 2.0**-6)
    assert (up - down <= ulp).all()


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_packing_modifiers(kind: str) -> None:
    big, negative = np.full(32, 1e39, np.float32), np.full(32, -2, np.float32)
    big[16:] = np.finfo(np.float32).max
    packed = apply(f"cvt.rn.satfinite.{kind}x2.f32", big, negative, dtype=np.uint32)
    largest = 0x7BFF if kind == "f16" else 0x7F7F
    assert (packed >> 16 == largest).all()
    packed = apply(f"cvt.rn.relu.{kind}x2.f32", negative, big, dtype=np.uint32)
    assert (packed >> 16 == 0).all()


def test_integers_saturate() -> None:
    values = np.array([-(2**31), -129, -1, 0, 127, 128, 255, 2**31 - 1] * 4, np.int32)
    table: dict[str, Any] = {"s8": np.int8, "u8": np.uint8, "u16": np.uint16}
    for name, dtype in table.items():
        info = np.iinfo(dtype)
        result = apply(f"cvt.sat.{name}.s32", values, dtype=np.int32)
        assert np.array_equal(result, np.clip(values, info.min, info.max)), name
    above = np.full(32, 0xABCD, np.uint32)
    packed = apply("cvt.pack.sat.s8.s32.b32", values, values[::-1].copy(), above, dtype=np.uint32)
    clipped = np.clip(values, -128, 127).astype(np.int8).view(np.uint8).astype(np.uint32)
    assert np.array_equal(packed, 0xABCD0000 | clipped << 8 | clipped[::-1])
