"""Lanes of a gang: by the values that they have for an instruction, and as bit masks."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .operands import active, lanes_of, scalar_at


class LaneGroup(NamedTuple):
    """Active lanes that agree on an operand tuple."""

    values: tuple[int, ...]
    lanes: NDArray[np.int64]
    everyone: bool


def groups(g: Any, m: Any, *columns: Any) -> list[LaneGroup]:
    """One group for each different tuple of operand values."""
    if g.n == 1 and m is None:
        return [LaneGroup(tuple(scalar_at(c, 0) for c in columns), np.zeros(1, np.int64), True)]
    lanes = active(m, g)
    if not lanes.size:
        return []
    given = [np.asarray(c) for c in columns]
    if m is not None:
        given = [c[lanes] if c.ndim else c for c in given]
    if all(not c.ndim or (c == c[0]).all() for c in given):
        return [LaneGroup(tuple(int(c[0] if c.ndim else c) for c in given), lanes, True)]
    rows = [lanes_of(c, g)[lanes] for c in columns]
    keys = list(zip(*(r.tolist() for r in rows), strict=True))
    return [
        LaneGroup(key, lanes[np.array([k == key for k in keys])], False)
        for key in sorted(set(keys))
    ]


def mask_of(lanes: NDArray[Any], lo: int, n: int) -> int:
    """Bit mask over the CTA's threads of lane indices counted from `lo`."""
    flags = np.zeros(n, np.bool_)
    flags[lanes] = True
    return flags_to_mask(flags, lo)


def flags_to_mask(flags: NDArray[np.bool_], lo: int) -> int:
    return int.from_bytes(np.packbits(flags, bitorder="little").tobytes(), "little") << lo
