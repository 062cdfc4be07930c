"""Per-lane opcodes on bits: logic, shifts, fields, permutations, and tests of values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from . import numeric as nm
from .memory import CLUSTER_SHIFT, LOCAL_BASE, SHARED_LIMIT
from .opcode_row import VIEW_OF_TYPE, Elementwise


def bit_rows() -> dict[str, Elementwise]:
    """and/or/xor/not, shifts, counts, fields, permutations."""
    table: dict[str, Elementwise] = {}
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
    for mode, selector in _PERMUTATIONS.items():
        table[f"prmt.b32{mode}"] = Elementwise("u", "uuu", _permuted(selector))
    table["prmt.b32"] = Elementwise("u", "uuu", nm.permute_bytes)
    for direction in "lr":
        for mode in ("wrap", "clamp"):
            table[f"shf.{direction}.{mode}.b32"] = Elementwise(
                "u", "uuu", nm.funnel(direction, mode)
            )
    for mode in ("wrap", "clamp"):
        table[f"bmsk.{mode}.b32"] = Elementwise("u", "uu", _mask_of(mode))
        for t in ("u32", "s32"):
            v = VIEW_OF_TYPE[t]
            table[f"szext.{mode}.{t}"] = Elementwise(v, v + "u", _extended(mode))
    return table


# The selector of each special mode, from the two low bits of the control operand.
_PERMUTATIONS: dict[str, tuple[int, int, int, int]] = {
    ".f4e": (0x3210, 0x4321, 0x5432, 0x6543),
    ".b4e": (0x5670, 0x6701, 0x7012, 0x0123),
    ".rc8": (0x0000, 0x1111, 0x2222, 0x3333),
    ".ecl": (0x3210, 0x3211, 0x3222, 0x3333),
    ".ecr": (0x0000, 0x1110, 0x2210, 0x3210),
    ".rc16": (0x1010, 0x3232, 0x1010, 0x3232),
}


def _permuted(selectors: tuple[int, int, int, int]) -> Callable[..., Any]:
    table = np.array(selectors, np.uint32)
    return lambda a, b, c: nm.permute_bytes(a, b, table[np.asarray(c) & np.uint32(3)])


def _mask_of(mode: str) -> Callable[..., Any]:
    """bmsk: `length` one bits from a position."""

    def run(position: Any, length: Any) -> Any:
        p, n = (np.asarray(x).astype(np.uint64) for x in (position, length))
        if mode == "wrap":
            p, n = p & np.uint64(31), n & np.uint64(31)
        p, n = np.minimum(p, np.uint64(32)), np.minimum(n, np.uint64(32))
        ones = (np.uint64(1) << n) - np.uint64(1)
        return (ones << p).astype(np.uint32)

    return run


def _extended(mode: str) -> Callable[..., Any]:
    """szext: the low `width` bits with the sign or zeros above them."""

    def run(a: Any, width: Any) -> Any:
        a = np.asarray(a)
        n = np.asarray(width).astype(np.int64)
        n = n & 31 if mode == "wrap" else np.minimum(n, 32)
        field = a.astype(np.int64) & ((np.int64(1) << n) - 1)
        if a.dtype.kind == "i":
            sign = np.where(n > 0, field >> np.maximum(n - 1, 0) & 1, 0)
            field = field - (sign << n)
        return field.astype(np.uint64).astype(np.uint32).view(a.dtype)

    return run


def integer_rows() -> dict[str, Elementwise]:
    """Integer opcodes beyond plain arithmetic: sad, 24-bit products, saturation, relu."""
    table: dict[str, Elementwise] = {}
    for t in ("u16", "s16", "u32", "s32", "u64", "s64"):
        v = VIEW_OF_TYPE[t]
        unsigned = VIEW_OF_TYPE["u" + t[1:]]
        table[f"sad.{t}"] = Elementwise(unsigned, v * 2 + unsigned, _sum_of_difference)
        if int(t[1:]) >= 32:
            table[f"bfe.{t}"] = Elementwise(v, v + "uu", nm.bit_extract)
            table[f"bfind.{t}"] = Elementwise("u", v, nm.find_leading)
            table[f"bfind.shiftamt.{t}"] = Elementwise("u", v, _shift_amount)
    for t in ("u32", "s32"):
        v = VIEW_OF_TYPE[t]
        for part, shift in (("lo", 0), ("hi", 16)):
            product = _product24(shift)
            table[f"mul24.{part}.{t}"] = Elementwise(v, v * 2, product)
            table[f"mad24.{part}.{t}"] = Elementwise(
                v, v * 3, lambda a, b, c, f=product: f(a, b) + c
            )
    table["add.sat.s32"] = Elementwise("i", "ii", lambda a, b: _clamped(np.add, a, b))
    table["sub.sat.s32"] = Elementwise("i", "ii", lambda a, b: _clamped(np.subtract, a, b))
    for name, fn in (("min", np.minimum), ("max", np.maximum)):
        table[f"{name}.relu.s32"] = Elementwise(
            "i", "ii", lambda a, b, f=fn: np.maximum(f(a, b), np.int32(0))
        )
    return table


def _sum_of_difference(a: Any, b: Any, c: Any) -> Any:
    return c + (np.maximum(a, b) - np.minimum(a, b)).astype(c.dtype)


def _shift_amount(a: Any) -> Any:
    """bfind.shiftamt: the left shift that brings the leading bit to the top."""
    found = nm.find_leading(a)
    top = np.uint32(np.asarray(a).dtype.itemsize * 8 - 1)
    return np.where(found == np.uint32(0xFFFFFFFF), found, top - found)


def _product24(shift: int) -> Callable[..., Any]:
    def run(a: Any, b: Any) -> Any:
        a, b = np.asarray(a), np.asarray(b)
        x, y = (v.astype(np.int64) << 40 >> 40 if v.dtype.kind == "i"
                else v.astype(np.int64) & 0xFFFFFF for v in (a, b))  # fmt: skip
        return ((x * y) >> shift).astype(np.uint64).astype(np.uint32).view(a.dtype)

    return run


def _clamped(fn: Any, a: Any, b: Any) -> Any:
    info = np.iinfo(np.int32)
    return np.clip(fn(a, b, dtype=np.int64), info.min, info.max).astype(np.int32)


def predicate_rows() -> dict[str, Elementwise]:
    """testp on floats, isspacep on addresses."""
    table: dict[str, Elementwise] = {}
    for t, v, smallest in (("f32", "f", 2.0**-126), ("f64", "d", 2.0**-1022)):
        tests: dict[str, Callable[..., Any]] = {
            "finite": np.isfinite,
            "infinite": np.isinf,
            "number": lambda x: ~np.isnan(x),
            "notanumber": np.isnan,
            "normal": lambda x, s=smallest: np.isfinite(x) & (np.abs(x) >= s),
            "subnormal": lambda x, s=smallest: (np.abs(x) < s) & (x != 0),
        }
        for name, fn in tests.items():
            table[f"testp.{name}.{t}"] = Elementwise("p", v, fn)
    own = np.int64(1 << CLUSTER_SHIFT)
    spaces: dict[str, Callable[..., Any]] = {
        "shared": lambda a: a < own,
        "shared::cta": lambda a: a < own,
        "shared::cluster": lambda a: a < SHARED_LIMIT,
        "local": lambda a: a >= LOCAL_BASE,
        "global": lambda a: (a >= SHARED_LIMIT) & (a < LOCAL_BASE),
        "const": lambda a: np.zeros(np.shape(a), bool),
    }
    for name, fn in spaces.items():
        table[f"isspacep.{name}"] = Elementwise("p", "l", fn)
    return table
