"""Table of per-lane opcodes: which register views an opcode reads and writes, and its function.

To add an opcode, add a row to `ELEMENTWISE` under its exact text.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from . import numeric as nm
from . import rounding
from .opcode_row import BANK_OF_VIEW, VIEW_OF_TYPE, Elementwise, View
from .ops_bits import bit_rows, integer_rows, predicate_rows
from .ops_packed import dot_rows, half_rows, pair_rows, with_sign


def _table() -> dict[str, Elementwise]:
    table: dict[str, Elementwise] = {}
    _integer_rows(table)
    _float_rows(table)
    _select_and_move_rows(table)
    for rows in (bit_rows, integer_rows, predicate_rows, half_rows, pair_rows, dot_rows):
        table.update(rows())
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
        if t[0] == "s":
            table[f"abs.{t}"] = Elementwise(v, v, np.absolute, True)
            table[f"neg.{t}"] = Elementwise(v, v, np.negative, True)


_DIRECTED = (".rz", ".rm", ".rp")


def _float_rows(table: dict[str, Elementwise]) -> None:
    for t, v in (("f32", "f"), ("f64", "d")):
        for direction in ("", ".rn", *_DIRECTED):
            for ftz in ("", ".ftz") if t == "f32" else ("",):
                _float_arithmetic(table, f"{direction}{ftz}", t, v)
        for ftz in ("", ".ftz") if t == "f32" else ("",):
            table[f"min{ftz}.xorsign.abs.{t}"] = Elementwise(v, v * 2, with_sign(np.fmin))
            table[f"max{ftz}.xorsign.abs.{t}"] = Elementwise(v, v * 2, with_sign(np.fmax))
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
    for name in ("rcp", "rsqrt"):
        table[f"{name}.approx.f64"] = table[f"{name}.approx.ftz.f64"] = Elementwise(
            "d", "d", APPROXIMATE[name]
        )
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
    mode = mods[1:3] if mods[:3] in _DIRECTED else ""
    if mode and t == "f64":
        return
    fma: Callable[..., Any] = rounding.fma if t == "f32" else rounding.fma64
    functions: dict[str, tuple[int, Callable[..., Any]]] = {
        "add": (2, np.add), "sub": (2, np.subtract), "mul": (2, np.multiply),
        "fma": (3, fma), "mad": (3, fma),
    }  # fmt: skip
    if mods[:3] in (".rn", *_DIRECTED):
        functions.update(div=(2, np.divide), rcp=(1, APPROXIMATE["rcp"]), sqrt=(1, np.sqrt))
    for name, (count, fn) in functions.items():
        if mode:
            fn = rounding.arithmetic(name.replace("mad", "fma"), mode)
        if ftz:
            fn = _with_ftz(fn)
        table[f"{name}{mods}.{t}"] = Elementwise(v, v * count, fn, isinstance(fn, np.ufunc))
        if count > 1 and name != "div":
            table[f"{name}{mods}.sat.{t}"] = Elementwise(
                v, v * count, lambda *args, f=fn: nm.saturate(f(*args))
            )


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


def _after(load: Callable[..., Any], compare: Callable[..., Any]) -> Callable[..., Any]:
    return lambda a, b: compare(load(np.asarray(a)), load(np.asarray(b)))


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
        compare = _after(nm.bf16_to_f32 if kind == "bf16" else nm.f16_to_f32, compare)
    if kind == "f32" and "ftz" in parts:
        compare = _after(nm.flush, compare)
    if not mods:
        if inverted:
            return Elementwise("p", v * 2, lambda a, b: ~compare(a, b))
        return Elementwise("p", v * 2, compare, isinstance(compare, np.ufunc))
    combine = _COMBINE[mods[0]]
    if inverted:
        return Elementwise("p", v * 2 + "p", lambda a, b, c: combine(~compare(a, b), c))
    return Elementwise("p", v * 2 + "p", lambda a, b, c: combine(compare(a, b), c))


ELEMENTWISE: dict[str, Elementwise] = _table()
