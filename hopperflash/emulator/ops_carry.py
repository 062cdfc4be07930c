"""Integer arithmetic through the condition code: add.cc, addc, sub.cc, subc, mad.cc, madc."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from . import numeric as nm
from .opcode_row import VIEW_OF_TYPE, Elementwise
from .ptx_ir import Register

CARRY = Register("p", "%cc")
"""CC.CF of each thread: the carry of a sum, the borrow of a difference."""
NEW_CARRY = Register("p", "%cc.new")
"""Between the operation that computes a carry and the one that moves it into `CARRY`."""


class CarryRow(NamedTuple):
    """An opcode's result and carry; each reads the sources and, where `takes` is set, `CARRY`."""

    result: Elementwise
    carry: Elementwise | None
    takes: bool


def _table() -> dict[str, CarryRow]:
    table: dict[str, CarryRow] = {}
    for kind in ("u32", "s32", "u64", "s64"):
        # Carries are the same for signed and unsigned operands; only the high product is not.
        view = VIEW_OF_TYPE["u" + kind[1:]]
        signed = VIEW_OF_TYPE[kind]
        high = nm.mul_hi32 if kind[1:] == "32" else nm.mul_hi64
        families: dict[str, tuple[int, str, Any, Any]] = {
            "add": (2, view, _sum, _sum_carries),
            "sub": (2, view, _difference, _difference_borrows),
            "mad.lo": (3, view, _after(np.multiply, view, _sum),
                       _after(np.multiply, view, _sum_carries)),
            "mad.hi": (3, signed, _after(high, view, _sum), _after(high, view, _sum_carries)),
        }  # fmt: skip
        for name, (count, sources, result, carries) in families.items():
            root, _, part = name.partition(".")
            part = f".{part}" if part else ""
            for takes, gives in ((False, True), (True, False), (True, True)):
                views = sources * count + ("p" if takes else "")
                opcode = f"{root}{'c' if takes else ''}{part}{'.cc' if gives else ''}.{kind}"
                table[opcode] = CarryRow(
                    Elementwise(view, views, result),
                    Elementwise("p", views, carries) if gives else None,
                    takes,
                )
    return table


def _sum(a: Any, b: Any, carry: Any = False) -> Any:
    return a + b + np.asarray(carry).astype(a.dtype)


def _sum_carries(a: Any, b: Any, carry: Any = False) -> Any:
    total = a + b
    return (total < a) | ((total + np.asarray(carry).astype(a.dtype)) < total)


def _difference(a: Any, b: Any, borrow: Any = False) -> Any:
    return a - b - np.asarray(borrow).astype(a.dtype)


def _difference_borrows(a: Any, b: Any, borrow: Any = False) -> Any:
    return (a < b) | ((a == b) & borrow)


def _after(product: Callable[..., Any], view: str, fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` of a product (its low or high half) and the addend, both seen as unsigned."""
    kind = {"u": np.uint32, "q": np.uint64}[view]

    def run(a: Any, b: Any, c: Any, carry: Any = False) -> Any:
        return fn(np.asarray(product(a, b)).view(kind), np.asarray(c).view(kind), carry)

    return run


CARRY_ROWS = _table()
