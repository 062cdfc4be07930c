"""Table of per-lane opcodes: which register views an opcode reads and writes, and its function.

A view letter names how a register row is seen: h/e = u16/s16, u/i/f = u32/s32/f32,
q/l/d = u64/s64/f64, p = predicate. To add an opcode, add a row to `ELEMENTWISE` (exact opcode
text) or, for families with many modifiers, a builder to `BUILDERS`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from . import numeric as nm

View = str
VIEW_OF_TYPE: dict[str, View] = {
    "b8": "h", "u8": "h", "s8": "e",
    "b16": "h", "u16": "h", "s16": "e", "f16": "h", "bf16": "h",
    "b32": "u", "u32": "u", "s32": "i", "f32": "f", "f16x2": "u", "bf16x2": "u",
    "b64": "q", "u64": "q", "s64": "l", "f64": "d",
    "pred": "p",
}  # fmt: skip
BANK_OF_VIEW = {
    "h": "h", "e": "h", "u": "u", "i": "u", "f": "u", "q": "q", "l": "q", "d": "q", "p": "p",
}  # fmt: skip


class Elementwise(NamedTuple):
    """dst = fn(*srcs); a ufunc also takes out= and where=."""

    dst: View
    srcs: str
    fn: Callable[..., Any]
    ufunc: bool = False


def _table() -> dict[str, Elementwise]:
    table: dict[str, Elementwise] = {}
    _integer_rows(table)
    _float_rows(table)
    _logic_rows(table)
    _select_and_move_rows(table)
    _half_rows(table)
    return table


def _integer_rows(table: dict[str, Elementwise]) -> None:
    for t in ("u16", "s16", "u32", "s32", "u64", "s64"):
        v = VIEW_OF_TYPE[t]
        width = int(t[1:])
        wide = {"h": "u", "e": "i", "u": "q", "i": "l"}.get(v)
        high = {16: nm.mul_hi16, 32: nm.mul_hi32, 64: nm.mul_hi64}[width]
        table[f"add.{t}"] = Elementwise(v, v * 2, np.add, True)
        table[f"sub.{t}"] = Elementwise(v, v * 2, np.subtract, True)
        table[f"mul.lo.{t}"] = Elementwise(v, v * 2, np.multiply, True)
        table[f"mul.hi.{t}"] = Elementwise(v, v * 2, high)
        table[f"mad.lo.{t}"] = Elementwise(v, v * 3, lambda a, b, c: a * b + c)
        table[f"mad.hi.{t}"] = Elementwise(v, v * 3, lambda a, b, c, f=high: f(a, b) + c)
        if wide:
            table[f"mul.wide.{t}"] = Elementwise(wide, v * 2, nm.mul_wide)
            table[f"mad.wide.{t}"] = Elementwise(
                wide, v * 2 + wide, lambda a, b, c: nm.mul_wide(a, b) + c
            )
        table[f"min.{t}"] = Elementwise(v, v * 2, np.minimum, True)
        table[f"max.{t}"] = Elementwise(v, v * 2, np.maximum, True)
        table[f"div.{t}"] = Elementwise(v, v * 2, nm.truncated_div)
        table[f"rem.{t}"] = Elementwise(v, v * 2, nm.truncated_rem)
        table[f"shr.{t}"] = Elementwise(v, v + "u", nm.shift_right)
        if width >= 32:
            table[f"bfe.{t}"] = Elementwise(v, v + "uu", nm.bit_extract)
            table[f"bfind.{t}"] = Elementwise("u", v, nm.find_leading)
        if t[0] == "s":
            table[f"abs.{t}"] = Elementwise(v, v, np.absolute, True)
            table[f"neg.{t}"] = Elementwise(v, v, np.negative, True)
    for name, fn in (("min", np.minimum), ("max", np.maximum)):
        table[f"{name}.relu.s32"] = Elementwise(
            "i", "ii", lambda a, b, f=fn: np.maximum(f(a, b), np.int32(0))
        )
    for t in ("u32", "s32"):
        v = VIEW_OF_TYPE[t]
        table[f"sad.{t}"] = Elementwise("u", v * 2 + "u", _sum_abs_diff)
    for t in ("u32.u32", "s32.s32"):
        table[f"dp2a.lo.{t}"] = Elementwise(
            t[0].replace("s", "i"), "uu" + t[0].replace("s", "i"), _dot2(0, t[0] == "s")
        )
        table[f"dp2a.hi.{t}"] = Elementwise(
            t[0].replace("s", "i"), "uu" + t[0].replace("s", "i"), _dot2(2, t[0] == "s")
        )


def _sum_abs_diff(a: Any, b: Any, c: Any) -> Any:
    return c + (np.maximum(a, b) - np.minimum(a, b)).astype(np.uint32)


def _dot2(first_byte: int, signed: bool) -> Callable[..., Any]:
    half, octet = (np.int16, np.int8) if signed else (np.uint16, np.uint8)

    def run(a: Any, b: Any, c: Any) -> Any:
        result = np.array(c)
        for i in range(2):
            x = (np.asarray(a) >> np.uint32(16 * i)).astype(np.uint16).view(half)
            y = (np.asarray(b) >> np.uint32(8 * (first_byte + i))).astype(np.uint8).view(octet)
            result = result + x.astype(result.dtype) * y.astype(result.dtype)
        return result

    return run


def _float_rows(table: dict[str, Elementwise]) -> None:
    for t, v in (("f32", "f"), ("f64", "d")):
        for rounding in ("", ".rn", ".rz", ".rm", ".rp"):
            for ftz in ("", ".ftz") if t == "f32" else ("",):
                _float_arithmetic(table, f"{rounding}{ftz}", t, v)
        for ftz in ("", ".ftz") if t == "f32" else ("",):
            table[f"min{ftz}.{t}"] = Elementwise(v, v * 2, np.fmin, True)
            table[f"max{ftz}.{t}"] = Elementwise(v, v * 2, np.fmax, True)
            table[f"min{ftz}.NaN.{t}"] = Elementwise(v, v * 2, np.minimum, True)
            table[f"max{ftz}.NaN.{t}"] = Elementwise(v, v * 2, np.maximum, True)
            table[f"max3{ftz}.{t}"] = Elementwise(
                v, v * 3, lambda a, b, c: np.fmax(np.fmax(a, b), c)
            )
            table[f"abs{ftz}.{t}"] = Elementwise(v, v, np.absolute, True)
            table[f"neg{ftz}.{t}"] = Elementwise(v, v, np.negative, True)
        table[f"copysign.{t}"] = Elementwise(v, v * 2, lambda a, b: np.copysign(b, a))
    for name, fn in APPROXIMATE.items():
        table[f"{name}.approx.f32"] = Elementwise("f", "f", fn)
        table[f"{name}.approx.ftz.f32"] = Elementwise("f", "f", _with_ftz(fn))
    table["ex2.approx.ftz.f32"] = Elementwise("f", "f", nm.ex2_ftz)
    table["div.approx.f32"] = Elementwise("f", "ff", np.divide, True)
    table["div.full.f32"] = Elementwise("f", "ff", np.divide, True)
    table["div.approx.ftz.f32"] = Elementwise("f", "ff", _with_ftz(np.divide))
    table["div.full.ftz.f32"] = Elementwise("f", "ff", _with_ftz(np.divide))


def _float_arithmetic(table: dict[str, Elementwise], mods: str, t: str, v: View) -> None:
    ftz = mods.endswith(".ftz")
    if mods[:3] in (".rz", ".rm", ".rp"):
        return
    for name, fn in (("add", np.add), ("sub", np.subtract), ("mul", np.multiply)):
        table[f"{name}{mods}.{t}"] = (
            Elementwise(v, v * 2, _with_ftz(fn)) if ftz else Elementwise(v, v * 2, fn, True)
        )
        table[f"{name}{mods}.sat.{t}"] = Elementwise(
            v, v * 2, lambda a, b, f=fn: nm.saturate(f(a, b))
        )
    fma: Callable[..., Any] = nm.fma32 if t == "f32" else lambda a, b, c: a * b + c
    if ftz:
        fma = _with_ftz(fma)
    for name in ("fma", "mad"):
        table[f"{name}{mods}.{t}"] = Elementwise(v, v * 3, fma)
        table[f"{name}{mods}.sat.{t}"] = Elementwise(
            v, v * 3, lambda a, b, c, f=fma: nm.saturate(f(a, b, c))
        )
    if ".rn" in mods:
        table[f"div{mods}.{t}"] = Elementwise(v, v * 2, np.divide, True)
        table[f"rcp{mods}.{t}"] = Elementwise(v, v, APPROXIMATE["rcp"])
        table[f"sqrt{mods}.{t}"] = Elementwise(v, v, np.sqrt, True)
    if t == "f32" and mods in (".rn", ".rn.ftz"):
        for name, fn in (("add", np.add), ("sub", np.subtract), ("mul", np.multiply)):
            table[f"{name}{mods}.f32x2"] = Elementwise("q", "qq", _pair(fn))
        table[f"fma{mods}.f32x2"] = Elementwise("q", "qqq", _pair(nm.fma32))


def _pair(fn: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        broadcast = np.broadcast_arrays(*(np.asarray(a) for a in args))
        floats = [np.ascontiguousarray(a).view(np.float32) for a in broadcast]
        return np.ascontiguousarray(fn(*floats)).view(np.uint64)

    return run


def _with_ftz(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: nm.flush(fn(*(nm.flush(np.asarray(a)) for a in args)))


def _reciprocal_sqrt(x: Any) -> Any:
    return np.divide(x.dtype.type(1), np.sqrt(x))


APPROXIMATE: dict[str, Callable[..., Any]] = {
    "ex2": np.exp2,
    "lg2": np.log2,
    "rcp": lambda x: np.divide(x.dtype.type(1), x),
    "rsqrt": _reciprocal_sqrt,
    "sqrt": np.sqrt,
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
}


def _logic_rows(table: dict[str, Elementwise]) -> None:
    for t in ("pred", "b16", "b32", "b64"):
        v = VIEW_OF_TYPE[t]
        table[f"and.{t}"] = Elementwise(v, v * 2, np.bitwise_and, True)
        table[f"or.{t}"] = Elementwise(v, v * 2, np.bitwise_or, True)
        table[f"xor.{t}"] = Elementwise(v, v * 2, np.bitwise_xor, True)
        table[f"not.{t}"] = Elementwise(v, v, np.invert, True)
        if t != "pred":
            table[f"cnot.{t}"] = Elementwise(v, v, lambda a: (a == 0).astype(a.dtype))
            table[f"shl.{t}"] = Elementwise(v, v + "u", nm.shift_left)
            table[f"shr.{t}"] = Elementwise(v, v + "u", nm.shift_right)
    for t in ("b32", "b64"):
        v = VIEW_OF_TYPE[t]
        table[f"popc.{t}"] = Elementwise("u", v, nm.popcount)
        table[f"clz.{t}"] = Elementwise("u", v, nm.count_leading_zeros)
        table[f"brev.{t}"] = Elementwise(v, v, nm.reverse_bits)
        table[f"bfi.{t}"] = Elementwise(v, v * 2 + "uu", nm.bit_insert)
    table["prmt.b32"] = Elementwise("u", "uuu", nm.permute_bytes)
    for direction in "lr":
        for mode in ("wrap", "clamp"):
            table[f"shf.{direction}.{mode}.b32"] = Elementwise(
                "u", "uuu", nm.funnel(direction, mode)
            )


def _select(a: Any, b: Any, p: Any) -> Any:
    return np.where(p, a, b)


def _select_and_move_rows(table: dict[str, Elementwise]) -> None:
    for t in VIEW_OF_TYPE:
        if t in ("b8", "u8", "s8"):
            continue
        v = VIEW_OF_TYPE[t]
        raw = BANK_OF_VIEW[v]
        if t == "pred":
            table["mov.pred"] = Elementwise("p", "p", _copy)
        else:
            table[f"mov.{t}"] = Elementwise(raw, raw, np.positive, True)
        if t != "pred":
            table[f"selp.{t}"] = Elementwise(raw, raw * 2 + "p", _select)
            table[f"slct.{t}.s32"] = Elementwise(
                raw, raw * 2 + "i", lambda a, b, c: np.where(c >= 0, a, b)
            )
            table[f"slct.{t}.f32"] = Elementwise(
                raw, raw * 2 + "f", lambda a, b, c: np.where(c >= 0, a, b)
            )


def _copy(a: Any) -> Any:
    return a


def _half_rows(table: dict[str, Elementwise]) -> None:
    operations: dict[str, tuple[int, Callable[..., Any]]] = {
        "add": (2, np.add), "sub": (2, np.subtract), "mul": (2, np.multiply),
        "fma": (3, nm.fma32), "min": (2, np.fmin), "max": (2, np.fmax),
        "neg": (1, np.negative), "abs": (1, np.absolute),
        "ex2.approx": (1, np.exp2), "tanh.approx": (1, np.tanh),
    }  # fmt: skip
    for kind in ("bf16", "f16"):
        for name, (count, fn) in operations.items():
            for mod in ("", ".rn", ".ftz", ".rn.ftz"):
                table[f"{name}{mod}.{kind}x2"] = Elementwise("u", "u" * count, nm.packed(kind, fn))
                table[f"{name}{mod}.{kind}"] = Elementwise("h", "h" * count, nm.scalar16(kind, fn))
        table[f"fma.rn.relu.{kind}x2"] = Elementwise(
            "u", "uuu", nm.packed(kind, lambda a, b, c: np.fmax(nm.fma32(a, b, c), np.float32(0)))
        )


_ORDERED: dict[str, Callable[..., Any]] = {
    "eq": np.equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip
_UNSIGNED_NAMES = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
_OPPOSITE = {"eq": "ne", "lt": "ge", "le": "gt", "gt": "le", "ge": "lt"}


def _ordered_not_equal(a: Any, b: Any) -> Any:
    return (a < b) | (a > b)


def comparison(name: str, is_float: bool) -> Callable[..., Any] | None:
    """The comparison of a setp; float `ne` is ordered, `neu` is not."""
    if name in _ORDERED:
        return _ORDERED[name]
    if not is_float:
        return np.not_equal if name == "ne" else _ORDERED.get(_UNSIGNED_NAMES.get(name, ""))
    special: dict[str, Callable[..., Any]] = {
        "ne": _ordered_not_equal,
        "neu": np.not_equal,
        "equ": lambda a, b: ~_ordered_not_equal(a, b),
        "num": lambda a, b: (a == a) & (b == b),
        "nan": lambda a, b: (a != a) | (b != b),
    }
    if name in special:
        return special[name]
    if name.endswith("u") and name[:-1] in _OPPOSITE:
        opposite = _ORDERED[_OPPOSITE[name[:-1]]]
        return lambda a, b: ~opposite(a, b)
    return None


_COMBINE: dict[str, Callable[..., Any]] = {
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
}  # fmt: skip


def setp(parts: tuple[str, ...], inverted: bool) -> Elementwise | None:
    """setp.CMP[.BOOL][.ftz].TYPE; `inverted` gives the second destination."""
    kind = parts[-1]
    v = VIEW_OF_TYPE.get(kind)
    mods = [m for m in parts[2:-1] if m != "ftz"]
    is_float = kind.startswith(("f", "bf"))
    compare = comparison(parts[1], is_float)
    if v is None or compare is None or len(mods) > 1 or (mods and mods[0] not in _COMBINE):
        return None
    if kind in ("f16", "bf16"):
        load = nm.bf16_to_f32 if kind == "bf16" else nm.f16_to_f32
        base = compare
        compare = lambda a, b: base(load(np.asarray(a)), load(np.asarray(b)))  # noqa: E731
    if not mods:
        if inverted:
            return Elementwise("p", v * 2, lambda a, b: ~compare(a, b))
        return Elementwise("p", v * 2, compare, isinstance(compare, np.ufunc))
    combine = _COMBINE[mods[0]]
    if inverted:
        return Elementwise("p", v * 2 + "p", lambda a, b, c: combine(~compare(a, b), c))
    return Elementwise("p", v * 2 + "p", lambda a, b, c: combine(compare(a, b), c))


ELEMENTWISE: dict[str, Elementwise] = _table()
