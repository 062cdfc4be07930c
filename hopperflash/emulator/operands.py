"""Readers and writers of operands for effects: small closures over a gang's register views."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .codegen_values import immediate
from .decode import RowOf
from .ptx_ir import Address, Immediate, Register, Sink, Special, Symbol
from .special import read_special

Reader = Callable[[Any], Any]
Writer = Callable[[Any, Any, Any], None]


def reader(operand: Any, view: str, row: RowOf) -> Reader:
    """Reads an operand as the lanes of a gang (or a scalar, for literals)."""
    if isinstance(operand, Register):
        index = row(operand)
        return lambda g: g.rows[view][index]
    if isinstance(operand, Immediate):
        value = immediate(operand, view)
        return lambda g: value
    if isinstance(operand, Special):
        return lambda g: read_special(g, operand.name, view)
    if isinstance(operand, Symbol):
        return lambda g: g.cta.symbol_address(operand)
    raise TypeError(operand)


def lane_reader(operand: Any, view: str, row: RowOf) -> Callable[[Any, int], int]:
    """Reads an operand as one lane has it."""
    if isinstance(operand, Register):
        index, matrix = row(operand), view.upper()
        return lambda g, lane: getattr(g, matrix).item(index, lane)
    read = reader(operand, view, row)
    return lambda g, lane: scalar_at(read(g), lane)


def lanes_of(value: Any, gang: Any) -> NDArray[Any]:
    """A value with one entry per lane of the gang."""
    array = np.asarray(value)
    return array if array.ndim else np.full(gang.n, array)


def address_reader(address: Address, row: RowOf) -> Callable[[Any], NDArray[np.int64]]:
    """The addresses of all lanes as int64."""
    base, offset = address.base, address.offset
    if isinstance(base, Register):
        index, view = row(base), "u" if base.bank == "u" else "q"
        step = np.int64(offset)
        if offset:
            return lambda g: g.rows[view][index].astype(np.int64) + step
        return lambda g: g.rows[view][index].astype(np.int64)
    if isinstance(base, Immediate):
        fixed = base.value + offset
        return lambda g: np.full(g.n, fixed, np.int64)
    symbol = Symbol(base.name, base.offset + offset)
    return lambda g: np.full(g.n, g.cta.symbol_address(symbol), np.int64)


def writer(operand: Any, view: str, row: RowOf) -> Writer:
    """Stores lane values into a register where the mask is true."""
    if isinstance(operand, Sink):
        return lambda g, value, m: None
    index = row(operand)

    def write(g: Any, value: Any, m: Any) -> None:
        if m is None:
            g.rows[view][index][...] = value
        else:
            np.copyto(g.rows[view][index], value, "unsafe", m)

    return write


def active(m: Any, gang: Any) -> NDArray[np.int64]:
    """Indices of the active lanes."""
    if m is None:
        every: NDArray[np.int64] = gang.every
        return every
    return np.nonzero(m)[0]


def one_lane_per_warp(m: Any, gang: Any) -> list[tuple[int, int]]:
    """(warp, index of its first active lane) for each warp with an active lane."""
    if m is None:
        return [
            (warp, max(32 * warp - gang.lo, 0))
            for warp in range(gang.first_warp, gang.last_warp + 1)
        ]
    lanes = active(m, gang)
    warps = (lanes + gang.lo) >> 5
    found, first = np.unique(warps, return_index=True)
    return [(int(w), int(lanes[i])) for w, i in zip(found, first, strict=True)]


def scalar_at(value: Any, lane: int) -> int:
    """One lane's value as an int."""
    array = np.asarray(value)
    return int(array[lane]) if array.ndim else int(array)


def every_lane(m: Any, gang: Any) -> list[tuple[int, int]]:
    """(warp, index) of every active lane."""
    return [(lane + gang.lo >> 5, lane) for lane in active(m, gang).tolist()]


def distinct_lanes(m: Any, gang: Any, *columns: Any) -> list[tuple[int, int]]:
    """(warp, index) of the first active lane of each warp with its operands.

    A warp whose lanes agree issues a bulk store once: it is an instruction of the uniform datapath.
    Not so a reduction, which counts how often it is issued: PTX promises one for every lane.
    """
    lanes = active(m, gang)
    if not lanes.size:
        return []
    rows = [lanes + gang.lo >> 5, *(lanes_of(c, gang)[lanes].astype(np.int64) for c in columns)]
    table = np.stack(rows)
    changes = (table[:, 1:] != table[:, :-1]).any(axis=0)
    found: dict[Any, tuple[int, int]] = {}
    for i in (0, *(np.flatnonzero(changes) + 1).tolist()):
        key = tuple(table[:, i].tolist())
        found.setdefault(key, (key[0], int(lanes[i])))
    return list(found.values())
