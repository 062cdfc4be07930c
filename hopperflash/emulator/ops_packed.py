"""Per-lane opcodes on 16-bit floats, packed pairs, and dot products of bytes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from . import numeric as nm
from . import rounding
from .opcode_row import Elementwise

_Function = Callable[..., Any]


def with_sign(fn: _Function) -> _Function:
    """.xorsign.abs: of the magnitudes, with the product of the signs."""

    def run(a: Any, b: Any) -> Any:
        sign = np.signbit(a) ^ np.signbit(b)
        return np.copysign(fn(np.abs(a), np.abs(b)), np.where(sign, -1, 1).astype(a.dtype))

    return run


def _relu(fn: _Function) -> _Function:
    """Negative results become 0; NaN stays."""

    def run(*args: Any) -> Any:
        result = fn(*args)
        return np.where(result < 0, result.dtype.type(0), result)

    return run


def _saturated(fn: _Function) -> _Function:
    return lambda *args: nm.saturate(fn(*args))


def half_rows() -> dict[str, Elementwise]:
    """Arithmetic in float32 rounded once to 16 bits; fma rounds to odd before that."""
    operations: dict[str, tuple[int, _Function]] = {
        "add": (2, np.add), "sub": (2, np.subtract), "mul": (2, np.multiply),
        "fma": (3, rounding.fma_to_odd), "min": (2, np.fmin), "max": (2, np.fmax),
        "min.NaN": (2, np.minimum), "max.NaN": (2, np.maximum),
        "min.xorsign.abs": (2, with_sign(np.fmin)),
        "max.xorsign.abs": (2, with_sign(np.fmax)),
        "neg": (1, np.negative), "abs": (1, np.absolute),
        "ex2.approx": (1, np.exp2), "tanh.approx": (1, np.tanh),
        "fma.rn.relu": (3, _relu(rounding.fma_to_odd)),
    }  # fmt: skip
    for name in ("add", "sub", "mul"):
        operations[f"{name}.sat"] = (2, _saturated(operations[name][1]))
        operations[f"{name}.rn.sat"] = operations[f"{name}.sat"]
    operations["fma.rn.sat"] = (3, _saturated(rounding.fma_to_odd))
    table: dict[str, Elementwise] = {}
    for kind, (name, (count, fn)) in itertools.product(("bf16", "f16"), operations.items()):
        for mod in ("", ".rn", ".ftz", ".rn.ftz"):
            first, _, rest = name.partition(".")
            for spelled in (f"{name}{mod}", f"{first}{mod}{'.' if rest else ''}{rest}"):
                table[f"{spelled}.{kind}x2"] = Elementwise("u", "u" * count, nm.packed(kind, fn))
                table[f"{spelled}.{kind}"] = Elementwise("h", "h" * count, nm.scalar16(kind, fn))
    return table


def pair_rows() -> dict[str, Elementwise]:
    """Two 16-bit integers, or two float32, in one register."""
    table: dict[str, Elementwise] = {}
    for name, fn in (("add", np.add), ("min", np.minimum), ("max", np.maximum)):
        for kind, dtype in (("u16x2", np.uint16), ("s16x2", np.int16)):
            table[f"{name}.{kind}"] = Elementwise("u", "uu", _lanes(fn, dtype, np.uint32))
    for mods in (".rn", ".rn.ftz"):
        floats: dict[str, _Function] = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
        for name, function in floats.items():
            table[f"{name}{mods}.f32x2"] = Elementwise(
                "q", "qq", _lanes(function, np.float32, np.uint64)
            )
        table[f"fma{mods}.f32x2"] = Elementwise(
            "q", "qqq", _lanes(rounding.fma, np.float32, np.uint64)
        )
    return table


def _lanes(fn: _Function, part: Any, whole: Any) -> _Function:
    def run(*args: Any) -> Any:
        parts = [np.ascontiguousarray(a).view(part) for a in np.broadcast_arrays(*args)]
        return np.ascontiguousarray(fn(*parts)).view(whole)

    return run


def dot_rows() -> dict[str, Elementwise]:
    """dp4a and dp2a: signed if one of the factors is."""
    table: dict[str, Elementwise] = {}
    for a, b in itertools.product(("u32", "s32"), repeat=2):
        view = "i" if "s32" in (a, b) else "u"
        table[f"dp4a.{a}.{b}"] = Elementwise(view, "uu" + view, _dot(a, b, 4, 0))
        table[f"dp2a.lo.{a}.{b}"] = Elementwise(view, "uu" + view, _dot(a, b, 2, 0))
        table[f"dp2a.hi.{a}.{b}"] = Elementwise(view, "uu" + view, _dot(a, b, 2, 2))
    return table


def _dot(a_type: str, b_type: str, terms: int, first: int) -> _Function:
    bits = 32 // terms
    a_part: Any = np.dtype(f"{'i' if a_type == 's32' else 'u'}{bits // 8}")
    b_part: Any = np.dtype("i1" if b_type == "s32" else "u1")

    def run(a: Any, b: Any, c: Any) -> Any:
        result = np.array(c)
        for i in range(terms):
            x = (np.asarray(a) >> np.uint32(bits * i)).astype(f"u{bits // 8}").view(a_part)
            y = (np.asarray(b) >> np.uint32(8 * (first + i))).astype(np.uint8).view(b_part)
            result = result + x.astype(result.dtype) * y.astype(result.dtype)
        return result

    return run
