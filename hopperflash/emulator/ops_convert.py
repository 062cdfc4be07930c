"""cvt: conversions with one source, and the packing ones with two."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from . import numeric as nm
from . import rounding
from .element_types import to_float8, to_float32
from .opcode_row import Elementwise
from .ptx_ir import Instruction

_NUMPY = {
    "u8": np.uint8, "s8": np.int8, "u16": np.uint16, "s16": np.int16, "u32": np.uint32,
    "s32": np.int32, "u64": np.uint64, "s64": np.int64, "f32": np.float32, "f64": np.float64,
}  # fmt: skip
_INTEGRAL = {"rni", "rzi", "rmi", "rpi"}
_ROUNDING = {"rn", "rz", "rm", "rp", "rna"} | _INTEGRAL
_FLOATS = ("f16", "bf16", "f32", "f64")
_Function = Callable[..., Any]


def convert(ins: Instruction, dst_bank: str, src_bank: str) -> Elementwise | None:
    """cvt with one source; the register may be wider than the type."""
    mods = ins.parts[1:-2]
    to, source = ins.parts[-2:]
    if any(m not in _ROUNDING | {"sat", "satfinite", "ftz", "relu"} for m in mods):
        return None
    load = _loader(source)
    mode = next((m for m in mods if m in _ROUNDING), "")
    store = _storer(to, source, mode, "sat" in mods, "satfinite" in mods)
    if load is None or store is None:
        return None
    steps: list[_Function] = [load]
    if "ftz" in mods and source == "f32":
        steps.append(nm.flush)
    if "relu" in mods:
        steps.append(_relu)
    steps.append(store)
    if "ftz" in mods and to == "f32":
        steps.append(nm.flush)
    wide = {"h": np.uint16, "u": np.uint32, "q": np.uint64}[dst_bank]
    signed = {"h": np.int16, "u": np.int32, "q": np.int64}[dst_bank]

    def run(x: Any) -> Any:
        for step in steps:
            x = step(x)
        if x.dtype.kind == "f":
            x = x.view(np.uint32 if x.dtype.itemsize == 4 else np.uint64)
        elif x.dtype.kind == "i":
            x = x.astype(signed).view(wide)
        return x if x.dtype == wide else x.astype(wide)

    return Elementwise(dst_bank, src_bank, run)


def _relu(x: Any) -> Any:
    """Negative values become 0; NaN stays."""
    return np.where(x < 0, x.dtype.type(0), x)


def _loader(source: str) -> _Function | None:
    if source == "bf16":
        return nm.bf16_to_f32
    if source == "f16":
        return nm.f16_to_f32
    if source in ("f32", "f64"):
        kind = _NUMPY[source]
        return lambda x: np.ascontiguousarray(x).view(kind)
    if source in _NUMPY:
        kind = _NUMPY[source]
        return lambda x: np.asarray(x).astype(kind)
    return None


def _storer(to: str, source: str, mode: str, sat: bool, satfinite: bool) -> _Function | None:
    if to == "tf32":
        return _tf32(mode)
    if to in ("bf16", "f16"):
        half = _to_half(to, mode or "rn", satfinite)
        if source in _FLOATS:
            clamp: _Function = nm.saturate if sat else lambda x: x
            return lambda x: half(clamp(np.asarray(x)))
        return lambda x: half(rounding.integer_to_float("rn", np.float64)(x))
    if to not in _NUMPY or satfinite:
        return None
    target: Any = _NUMPY[to]
    if to in ("f32", "f64"):
        return _to_wide_float(target, source, mode, sat)
    if source in _FLOATS:
        return nm.float_to_int(mode, target) if mode in _INTEGRAL else None
    return _clamped(target) if sat else lambda x: x.astype(target)


def _to_wide_float(target: Any, source: str, mode: str, sat: bool) -> _Function:
    if mode in _INTEGRAL:
        integral = nm.round_to_integer(mode)
        return lambda x: integral(x).astype(target)
    if sat:
        return lambda x: nm.saturate(x.astype(target))
    directed = mode not in ("", "rn")
    if target is np.float32 and source not in _FLOATS and (directed or source[1:] == "64"):
        return rounding.integer_to_float(mode or "rn", target)
    if source == "f64" and target is np.float32 and mode in ("rz", "rm", "rp"):
        return lambda x: rounding.narrow(x, mode)
    return lambda x: x.astype(target)


def _clamped(target: Any) -> _Function:
    low, high = np.iinfo(target).min, np.iinfo(target).max

    def run(x: Any) -> Any:
        clamped = [min(max(int(v), low), high) for v in x.ravel()]
        return np.array(clamped, target).reshape(x.shape)

    return run


def _tf32(mode: str) -> _Function | None:
    """10 mantissa bits: rna rounds ties away from zero, rn to even."""
    if mode not in ("rna", "rn", "rz"):
        return None

    def run(x: Any) -> Any:
        bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
        half: Any = {
            "rna": np.uint32(0x1000), "rz": np.uint32(0),
            "rn": np.uint32(0xFFF) + (bits >> np.uint32(13) & np.uint32(1)),
        }[mode]  # fmt: skip
        rounded = (bits + half) & np.uint32(0xFFFFE000)
        return np.where(np.isfinite(x), rounded, np.where(np.isnan(x), np.uint32(0x7FFFFFFF), bits))

    return run


_LARGEST = {"f16": np.float32(65504), "bf16": np.array(0x7F7F0000, np.uint32).view(np.float32)[()]}


def _to_half(kind: str, mode: str, satfinite: bool) -> _Function:
    """float32 or float64 values to 16-bit floats in uint32; satfinite clamps to finite values."""
    nearest = nm.f32_to_bf16 if kind == "bf16" else nm.f32_to_f16
    largest = _LARGEST[kind]

    def run(x: Any) -> Any:
        if x.dtype == np.float64:
            x = rounding.narrow_to_odd(x)
        if satfinite:
            x = np.where(np.isnan(x), x, np.clip(x, -largest, largest))
        if mode == "rn":
            return nearest(x)
        return _directed_half(x, kind, mode)

    return run


def _directed_half(x: Any, kind: str, mode: str) -> Any:
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    if kind == "f16":
        rounded = rounding.narrow(x.astype(np.float64), mode, np.float16)
        result = rounded.view(np.uint16).astype(np.uint32)
    else:
        away = {"rz": False, "rm": np.signbit(x), "rp": ~np.signbit(x)}[mode]
        inexact = (bits & np.uint32(0xFFFF)) != 0
        finite = np.isfinite(x)
        result = (bits >> np.uint32(16)) + (inexact & away & finite).astype(np.uint32)
    return np.where(np.isnan(x), np.uint32(0x7FFF), result)


def _packing(kind: str, mode: str, satfinite: bool, relu: bool) -> _Function:
    """cvt.f16x2/bf16x2.f32 d, hi, lo."""
    half = _to_half(kind, mode, satfinite)
    before: _Function = _relu if relu else lambda x: x

    def run(hi: Any, lo: Any) -> Any:
        return (half(before(np.asarray(hi))) << np.uint32(16)) | half(before(np.asarray(lo)))

    return run


def _packed_float8(kind: str, relu: bool) -> _Function:
    def run(hi: Any, lo: Any) -> Any:
        parts = [to_float8(_relu(np.asarray(x)) if relu else np.asarray(x), kind) for x in (hi, lo)]
        return parts[0].astype(np.uint16) << np.uint16(8) | parts[1]

    return run


def _float8_of_halves(kind: str, relu: bool) -> _Function:
    pack = _packed_float8(kind, relu)

    def run(pair: Any) -> Any:
        pair = np.asarray(pair)
        hi, lo = nm.f16_to_f32(pair >> np.uint32(16)), nm.f16_to_f32(pair & np.uint32(0xFFFF))
        return pack(hi, lo)

    return run


def _halves_of_float8(kind: str, relu: bool) -> _Function:
    def run(pair: Any) -> Any:
        pair = np.asarray(pair)
        hi, lo = (to_float32((pair >> np.uint16(s)).astype(np.uint8), kind) for s in (8, 0))
        if relu:
            hi, lo = _relu(hi), _relu(lo)
        return nm.pack_f16x2(hi, lo)

    return run


def _packed_integers(target: Any) -> _Function:
    """cvt.pack.sat: a and b clamped, a above b, and the low bits of c above both."""
    clamp, bits = _clamped(target), np.dtype(target).itemsize * 8
    raw: Any = np.dtype(f"u{bits // 8}")

    def run(a: Any, b: Any, *c: Any) -> Any:
        a, b = (clamp(np.asarray(x)).view(raw).astype(np.uint32) for x in (a, b))
        packed = a << np.uint32(bits) | b
        return packed | np.asarray(c[0]) << np.uint32(2 * bits) if c else packed

    return run


def _packing_rows() -> dict[str, Elementwise]:
    table: dict[str, Elementwise] = {}
    for kind, relu in itertools.product(("bf16", "f16"), (False, True)):
        for mode, satfinite in itertools.product(("rn", "rz"), (False, True)):
            mods = f"{mode}{'.relu' * relu}{'.satfinite' * satfinite}"
            fn = _packing(kind, mode, satfinite, relu)
            table[f"cvt.{mods}.{kind}x2.f32"] = Elementwise("u", "ff", fn)
    # The two conversions of every attention kernel, without the detours.
    table["cvt.rn.bf16x2.f32"] = Elementwise("u", "ff", nm.pack_bf16x2)
    table["cvt.rn.f16x2.f32"] = Elementwise("u", "ff", nm.pack_f16x2)
    for kind, relu in itertools.product(("e4m3", "e5m2"), (False, True)):
        more = ".relu" * relu
        name = f"cvt.rn.satfinite{more}.{kind}x2"
        table[f"{name}.f32"] = Elementwise("h", "ff", _packed_float8(kind, relu))
        table[f"{name}.f16x2"] = Elementwise("h", "u", _float8_of_halves(kind, relu))
        table[f"cvt.rn{more}.f16x2.{kind}x2"] = Elementwise("u", "h", _halves_of_float8(kind, relu))
    for to in ("u16", "s16"):
        table[f"cvt.pack.sat.{to}.s32"] = Elementwise("u", "ii", _packed_integers(_NUMPY[to]))
    for to in ("u8", "s8"):
        table[f"cvt.pack.sat.{to}.s32.b32"] = Elementwise("u", "iiu", _packed_integers(_NUMPY[to]))
    return table


PACKING: dict[str, Elementwise] = _packing_rows()
