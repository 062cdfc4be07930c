"""Element types of tensor-core operands and tensor maps, and their conversion to float32."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .numeric import bf16_to_f32, f32_to_bf16, f32_to_f16

Bits = NDArray[Any]
Float32 = NDArray[np.float32]

ITEMSIZE = {
    "f16": 2,
    "bf16": 2,
    "tf32": 4,
    "f32": 4,
    "e4m3": 1,
    "e5m2": 1,
    "s8": 1,
    "u8": 1,
}
STORAGE: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}

_TF32_KEPT = np.uint32(0xFFFFE000)


def to_float32(bits: Bits, name: str) -> Float32:
    """Values of raw elements (unsigned integers of the element's width) in float32."""
    values: Float32
    match name:
        case "bf16":
            values = bf16_to_f32(bits)
        case "f16":
            values = bits.view(np.float16).astype(np.float32)
        case "f32":
            values = bits.view(np.float32)
        case "tf32":
            values = (bits & _TF32_KEPT).view(np.float32)
        case "s8":
            values = bits.view(np.int8).astype(np.float32)
        case "u8":
            values = bits.astype(np.float32)
        case _:
            values = _float8_values(name)[bits]
    return values


def from_float32(values: Float32, name: str) -> Bits:
    """Raw elements nearest to `values`, ties to even; overflow gives infinity."""
    bits: Bits
    match name:
        case "bf16":
            bits = f32_to_bf16(values).astype(np.uint16)
        case "f16":
            with np.errstate(over="ignore"):
                bits = f32_to_f16(values).astype(np.uint16)
        case "f32":
            bits = values.view(np.uint32)
        case "e4m3" | "e5m2":
            bits = to_float8(values, name)
        case _:
            raise ValueError(f"no conversion from float32 to {name}")
    return bits


def to_float8(values: NDArray[Any], name: str) -> NDArray[np.uint8]:
    """The nearest codes, ties to even; overflow and infinity give the largest finite value."""
    finite = _float8_values(name)[: _FLOAT8_FINITE[name]].astype(np.float64)
    middles = (finite[1:] + finite[:-1]) / 2
    magnitude = np.abs(np.asarray(values, np.float64))
    code = np.searchsorted(middles, magnitude, side="left")
    tie = (code < len(middles)) & (middles[np.minimum(code, len(middles) - 1)] == magnitude)
    code = code + (tie & (code & 1 == 1))
    code = np.where(np.isnan(magnitude), 0x7F, code | np.signbit(values) * 0x80)
    return code.astype(np.uint8)


_FLOAT8_FINITE = {"e4m3": 0x7F, "e5m2": 0x7C}
"""How many codes of one sign are finite."""


@lru_cache(maxsize=2)
def _float8_values(name: str) -> Float32:
    """The value of each of the 256 codes."""
    codes = np.arange(256, dtype=np.uint16)
    values: Float32
    if name == "e5m2":  # the upper byte of a float16
        values = (codes << np.uint16(8)).view(np.float16).astype(np.float32)
        return values
    if name != "e4m3":
        raise ValueError(f"unknown element type {name}")
    exponent = ((codes >> 3) & 15).astype(np.int32)
    mantissa = (codes & 7).astype(np.float32)
    normal = np.ldexp(1 + mantissa / 8, exponent - 7)
    subnormal = np.ldexp(mantissa / 8, -6)
    values = np.where(exponent == 0, subnormal, normal).astype(np.float32)
    values[(codes & 0x7F) == 0x7F] = np.nan
    return np.where(codes & 0x80, -values, values)
