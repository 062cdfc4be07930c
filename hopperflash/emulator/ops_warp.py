"""Warp-wide opcodes: shfl, vote, elect, match, redux, activemask, mma.sync.

A member mask names the lanes that take part. Threads wait until the lanes of their mask are here
(`Op.members`); the lanes of a warp may hold different masks, and each then sees its own group.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .decode import Effect, Op, RowOf, effect, unknown
from .errors import EmulationError
from .operands import lanes_of, reader, writer
from .ops_mma import decode_mma
from .ptx_ir import Immediate, Instruction, Negated, Pair

Flags = NDArray[np.bool_]
_FULL = 0xFFFFFFFF


def by_warp(g: Any, values: Any, fill: Any = 0) -> NDArray[Any]:
    """Lane values as [warps, 32], padded where the gang starts or ends inside a warp."""
    array = lanes_of(values, g)
    before, after = g.lo & 31, -g.hi & 31
    if before or after:
        array = np.concatenate(
            [np.full(before, fill, array.dtype), array, np.full(after, fill, array.dtype)]
        )
    return array.reshape(-1, 32)


def from_warps(g: Any, values: NDArray[Any]) -> NDArray[Any]:
    """The gang's lanes of a [warps, 32] array, or of [warps, 1] with one value for a warp."""
    flat = values.reshape(-1) if values.shape[1] == 32 else np.repeat(values[:, 0], 32)
    before = g.lo & 31
    return flat[before : before + g.n]


def _whole(g: Any, m: Any) -> bool:
    """Are all lanes of all warps of the gang active?"""
    return m is None and not (g.lo | g.hi) & 31


def _present(g: Any, m: Any) -> Flags:
    return by_warp(g, np.ones(g.n, bool) if m is None else m, False)


def _packed(flags: Flags) -> NDArray[np.uint32]:
    """The last axis of 32 flags as one word."""
    words: NDArray[np.uint32] = np.packbits(flags, axis=-1, bitorder="little").view(np.uint32)
    return words[..., 0]


def _is_full(mask: Any) -> bool:
    return isinstance(mask, Immediate) and mask.value & _FULL == _FULL


def _collective(ins: Instruction, mask: Any, make: Any, **operands: Any) -> Op:
    """A warp-wide operation of the lanes in `mask`."""
    members = None if _is_full(mask) else partial(reader, mask, "u")
    reads = (*operands.pop("reads", ()), mask)
    return effect(ins, make, reads=reads, collective="warp", members=members,
                  ends=members is not None, **operands)  # fmt: skip


class _Members:
    """Which lanes take part with each lane: flags [warps, 1 or 32, 32]."""

    def __init__(self, ins: Instruction, mask: Any, row: RowOf) -> None:
        self._ins = ins
        self._read = None if _is_full(mask) else reader(mask, "u", row)

    def __call__(self, g: Any, m: Any) -> Flags:
        present = _present(g, m)
        if self._read is None:
            return present[:, None, :]
        masks = by_warp(g, self._read(g))
        named = (masks[:, :, None] >> np.arange(32, dtype=np.uint32)) & np.uint32(1) != 0
        itself = named[:, np.arange(32), np.arange(32)]
        if (present & ~itself).any():
            raise EmulationError(f"a lane executes {self._ins.opcode} outside of its member mask")
        taking_part: Flags = named & present[:, None, :]
        return taking_part


_SHFL = re.compile(r"shfl\.sync\.(up|down|bfly|idx)\.b32$")


def decode_shfl(ins: Instruction) -> Op:
    match = _SHFL.match(ins.opcode)
    if match is None:
        raise unknown(ins)
    mode = match[1]
    dst, src, lane_operand, clamp_operand, mask = ins.operands
    value, flag = (dst.first, dst.second) if isinstance(dst, Pair) else (dst, None)

    fixed = _fixed_source(mode, lane_operand, clamp_operand) if _is_full(mask) else None

    def make(row: RowOf) -> Effect:
        read = reader(src, "u", row)
        shift, clamp = reader(lane_operand, "u", row), reader(clamp_operand, "u", row)
        members = _Members(ins, mask, row)
        write = writer(value, "u", row)
        write_flag = writer(flag, "p", row) if flag is not None else None

        def run(g: Any, m: Any) -> None:
            values = by_warp(g, read(g))
            if fixed is not None and _whole(g, m):
                write(g, values[:, fixed[0]].reshape(-1), None)
                if write_flag is not None:
                    write_flag(g, np.tile(fixed[1], len(values)), None)
                return
            b = by_warp(g, shift(g)).astype(np.int64) & 31
            c = by_warp(g, clamp(g)).astype(np.int64)
            source, valid = _shuffle_source(mode, b, c & 31, (c >> 8) & 31)
            taking_part = members(g, m)
            if not taking_part.all():
                _check_sources(ins, g, m, taking_part, source)
            result = np.take_along_axis(values, source, axis=1)
            write(g, from_warps(g, result), m)
            if write_flag is not None:
                write_flag(g, from_warps(g, valid), m)

        return run

    return _collective(ins, mask, make, writes=(dst,), reads=(src, lane_operand, clamp_operand))


def _fixed_source(mode: str, lane: Any, clamp: Any) -> tuple[Any, Any] | None:
    """Source lanes and validity of a warp, where they follow from literals."""
    if not isinstance(lane, Immediate) or not isinstance(clamp, Immediate):
        return None
    c = np.full((1, 32), clamp.value)
    source, valid = _shuffle_source(mode, np.full((1, 32), lane.value & 31), c & 31, c >> 8 & 31)
    return source[0], valid[0]


def _check_sources(
    ins: Instruction, g: Any, m: Any, members: Flags, source: NDArray[np.int64]
) -> None:
    """Reports lanes that read a lane which takes no part: its value is undefined."""
    everyone = np.broadcast_to(members, (len(members), 32, 32))
    known = np.take_along_axis(everyone, source[:, :, None], axis=2)[:, :, 0]
    bad = _present(g, m) & ~known
    if bad.any():
        warp, lane = (int(i) for i in np.argwhere(bad)[0])
        g.cta.machine.hazards.report(
            "shuffle from an inactive lane", ins, g.cta,
            f"lane {lane} of warp {g.first_warp + warp} reads lane {source[warp, lane]}",
        )  # fmt: skip


def _shuffle_source(
    mode: str, b: NDArray[Any], clamp: NDArray[Any], segment: NDArray[Any]
) -> tuple[NDArray[Any], NDArray[Any]]:
    lane = np.arange(32)
    highest = (lane & segment) | (clamp & ~segment)
    lowest = lane & segment
    if mode == "up":
        source = lane - b
        valid = source >= highest
    elif mode == "down":
        source = lane + b
        valid = source <= highest
    elif mode == "bfly":
        source = lane ^ b
        valid = source <= highest
    else:
        source = lowest | (b & ~segment)
        valid = source <= highest
    return np.where(valid, source, lane), valid


def decode_vote(ins: Instruction) -> Op:
    if not re.match(r"vote\.sync\.((all|any|uni)\.pred|ballot\.b32)$", ins.opcode):
        raise unknown(ins)
    mode = ins.parts[2]
    dst, src, mask = ins.operands
    register = src.register if isinstance(src, Negated) else src

    def make(row: RowOf) -> Effect:
        read, members = reader(register, "p", row), _Members(ins, mask, row)
        write = writer(dst, "u" if mode == "ballot" else "p", row)

        def run(g: Any, m: Any) -> None:
            taking_part = members(g, m)
            value = (by_warp(g, read(g), False) ^ isinstance(src, Negated))[:, None, :]
            result: NDArray[Any]
            if mode == "ballot":
                result = _packed(value & taking_part)
            elif mode == "any":
                result = np.any(value & taking_part, axis=2)
            else:
                result = np.all(value | ~taking_part, axis=2)
                if mode == "uni":
                    result |= ~np.any(value & taking_part, axis=2)
            write(g, from_warps(g, result), m)

        return run

    return _collective(ins, mask, make, writes=(dst,), reads=(src,))


def decode_elect(ins: Instruction) -> Op:
    """elect.sync: the lowest active lane of the members."""
    if ins.opcode != "elect.sync" or not isinstance(ins.operands[0], Pair):
        raise unknown(ins)
    dst, mask = ins.operands
    whole = _is_full(mask)

    def make(row: RowOf) -> Effect:
        members = _Members(ins, mask, row)
        write = writer(dst.first, "u", row)
        write_flag = writer(dst.second, "p", row)

        def run(g: Any, m: Any) -> None:
            if whole and _whole(g, m):
                write(g, 0, None)
                write_flag(g, g.lanes == 0, None)
                return
            leader = np.argmax(members(g, m), axis=2).astype(np.uint32)
            write(g, from_warps(g, leader), m)
            write_flag(g, from_warps(g, np.arange(32) == leader), m)

        return run

    return _collective(ins, mask, make, writes=(dst,))


def decode_activemask(ins: Instruction) -> Op:
    (dst,) = ins.operands

    def make(row: RowOf) -> Effect:
        write = writer(dst, "u", row)

        def run(g: Any, m: Any) -> None:
            write(g, from_warps(g, _packed(_present(g, m))[:, None]), m)

        return run

    return effect(ins, make, writes=(dst,))


_MATCH = re.compile(r"match\.(any|all)\.sync\.b(32|64)$")


def decode_match(ins: Instruction) -> Op:
    """The members with this lane's value, or all of them if all have it."""
    match = _MATCH.match(ins.opcode)
    if match is None:
        raise unknown(ins)
    every = match[1] == "all"
    dst, src, mask = ins.operands
    value, flag = (dst.first, dst.second) if isinstance(dst, Pair) else (dst, None)
    view = "u" if match[2] == "32" else "q"

    def make(row: RowOf) -> Effect:
        read, write = reader(src, view, row), writer(value, "u", row)
        members = _Members(ins, mask, row)
        write_flag = writer(flag, "p", row) if flag is not None else None

        def run(g: Any, m: Any) -> None:
            values, taking_part = by_warp(g, read(g)), members(g, m)
            same = (values[:, :, None] == values[:, None, :]) & taking_part
            if every:
                agreed = np.all(same | ~taking_part, axis=2)
                same &= agreed[:, :, None]
                if write_flag is not None:
                    write_flag(g, from_warps(g, agreed), m)
            write(g, from_warps(g, _packed(same)), m)

        return run

    return _collective(ins, mask, make, writes=(dst,), reads=(src,))


# Each reduction with what it takes for lanes that are no members.
_REDUX: dict[str, tuple[Any, Callable[[Any], int]]] = {
    "add": (np.add, lambda info: 0),
    "min": (np.minimum, lambda info: info.max),
    "max": (np.maximum, lambda info: info.min),
    "and": (np.bitwise_and, lambda info: info.max),
    "or": (np.bitwise_or, lambda info: 0),
    "xor": (np.bitwise_xor, lambda info: 0),
}


def decode_redux(ins: Instruction) -> Op:
    match = re.match(r"redux\.sync\.(?:(add|min|max)\.[us]32|(and|or|xor)\.b32)$", ins.opcode)
    if match is None:
        raise unknown(ins)
    fn, neutral = _REDUX[match[1] or match[2]]
    view = "i" if ins.parts[-1] == "s32" else "u"
    dst, src, mask = ins.operands

    def make(row: RowOf) -> Effect:
        read, write = reader(src, view, row), writer(dst, view, row)
        members = _Members(ins, mask, row)

        def run(g: Any, m: Any) -> None:
            values = by_warp(g, read(g))
            fill = values.dtype.type(neutral(np.iinfo(values.dtype)))
            masked = np.where(members(g, m), values[:, None, :], fill)
            write(g, from_warps(g, fn.reduce(masked, axis=2, dtype=values.dtype)), m)

        return run

    return _collective(ins, mask, make, writes=(dst,), reads=(src,))


WARP_OPS: dict[str, Callable[[Instruction], Op]] = {
    "shfl": decode_shfl,
    "vote": decode_vote,
    "elect": decode_elect,
    "activemask": decode_activemask,
    "match": decode_match,
    "redux": decode_redux,
    "mma": decode_mma,
}
