"""cvt: conversions with one source, and the packing ones with two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from . import numeric as nm
from .opcode_row import Elementwise
from .ptx_ir import Instruction

_NUMPY = {
    "u8": np.uint8, "s8": np.int8, "u16": np.uint16, "s16": np.int16, "u32": np.uint32,
    "s32": np.int32, "u64": np.uint64, "s64": np.int64, "f32": np.float32, "f64": np.float64,
}  # fmt: skip
_ROUNDING = {"rn", "rz", "rm", "rp", "rni", "rzi", "rmi", "rpi"}


def convert(ins: Instruction, dst_bank: str, src_bank: str) -> Elementwise | None:
    """cvt with one source; the register may be wider than the type."""
    mods = ins.parts[1:-2]
    to, source = ins.parts[-2:]
    if any(m not in _ROUNDING | {"sat", "ftz", "relu"} for m in mods):
        return None
    load = _loader(source)
    rounding = next((m for m in mods if m in _ROUNDING), "")
    store = _storer(to, source, rounding, "sat" in mods)
    if load is None or store is None:
        return None
    steps: list[Callable[..., Any]] = [load]
    if "ftz" in mods and source == "f32":
        steps.append(nm.flush)
    if "relu" in mods:
        steps.append(lambda x: np.fmax(x, np.float32(0)))
    steps.append(store)
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


def _loader(source: str) -> Callable[..., Any] | None:
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


def _storer(to: str, source: str, rounding: str, sat: bool) -> Callable[..., Any] | None:
    from_float = source in ("f16", "bf16", "f32", "f64")
    if to in ("bf16", "f16"):
        if rounding == "rz" and to == "bf16":
            return nm.f32_to_bf16_rz
        half = nm.f32_to_bf16 if to == "bf16" else nm.f32_to_f16
        return lambda x: half(np.asarray(x, np.float32))
    if to not in _NUMPY:
        return None
    target: Any = _NUMPY[to]
    if to in ("f32", "f64"):
        if rounding.endswith("i"):
            fn = nm.round_to_integer(rounding)
            return lambda x: fn(x).astype(target)
        if sat:
            return lambda x: nm.saturate(x.astype(target))
        return lambda x: x.astype(target)
    if from_float:
        return nm.float_to_int(rounding, target) if rounding.endswith("i") else None
    if sat:
        low, high = np.iinfo(target).min, np.iinfo(target).max
        return lambda x: np.array([min(max(int(v), low), high) for v in x.ravel()], target).reshape(
            x.shape
        )
    return lambda x: x.astype(target)


PACKING: dict[str, Elementwise] = {
    "cvt.rn.bf16x2.f32": Elementwise("u", "ff", nm.pack_bf16x2),
    "cvt.rn.f16x2.f32": Elementwise("u", "ff", nm.pack_f16x2),
    "cvt.rn.relu.bf16x2.f32": Elementwise(
        "u", "ff", lambda hi, lo: nm.pack_bf16x2(np.fmax(hi, 0), np.fmax(lo, 0))
    ),
    "cvt.rz.bf16x2.f32": Elementwise(
        "u", "ff", lambda hi, lo: (nm.f32_to_bf16_rz(hi) << np.uint32(16)) | nm.f32_to_bf16_rz(lo)
    ),
}
