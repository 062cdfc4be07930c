"""A row of the tables of per-lane opcodes, and the register views that it names.

A view letter names how a register row is seen: h/e = u16/s16, u/i/f = u32/s32/f32,
q/l/d = u64/s64/f64, p = predicate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

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
