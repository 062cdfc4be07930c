"""Literals as numpy scalars of a register view's type."""

from __future__ import annotations

from typing import Any

import numpy as np

from .ptx_ir import Immediate

DTYPE: dict[str, Any] = {
    "h": np.uint16, "e": np.int16, "u": np.uint32, "i": np.int32, "f": np.float32,
    "q": np.uint64, "l": np.int64, "d": np.float64, "p": np.bool_,
}  # fmt: skip


def immediate(operand: Immediate, view: str) -> Any:
    """The literal as a numpy scalar of a view's type."""
    kind = DTYPE[view]
    size = np.dtype(kind).itemsize
    if view == "p":
        return kind(operand.value != 0)
    if view in "fd" and operand.width == 0:
        return kind(operand.value)
    bits = operand.value % (1 << 8 * size)
    return np.frombuffer(bits.to_bytes(size, "little"), kind)[0]
