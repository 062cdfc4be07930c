"""Warp-wide opcodes: shfl, vote, elect, match, redux, activemask, mma.sync."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .decode import Effect, Op, RowOf, effect, unknown
from .operands import lanes_of, one_lane_per_warp, reader, writer
from .ops_mma import decode_mma
from .ptx_ir import Instruction, Negated, Pair


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
    """The gang's lanes of a [warps, 32] array."""
    flat = np.ascontiguousarray(values).reshape(-1)
    before = g.lo & 31
    return flat[before : before + g.n]


def _present(g: Any, m: Any) -> NDArray[np.bool_]:
    return by_warp(g, np.ones(g.n, bool) if m is None else m, False)


_SHFL = re.compile(r"shfl\.sync\.(up|down|bfly|idx)\.b32$")


def decode_shfl(ins: Instruction) -> Op:
    match = _SHFL.match(ins.opcode)
    if match is None:
        raise unknown(ins)
    mode = match[1]
    dst, src, lane_operand, clamp_operand = ins.operands[:4]
    value, flag = (dst.first, dst.second) if isinstance(dst, Pair) else (dst, None)

    def make(row: RowOf) -> Effect:
        read = reader(src, "u", row)
        shift, clamp = reader(lane_operand, "u", row), reader(clamp_operand, "u", row)
        write = writer(value, "u", row)
        write_flag = writer(flag, "p", row) if flag is not None else None

        def run(g: Any, m: Any) -> None:
            values = by_warp(g, read(g))
            b = by_warp(g, shift(g)).astype(np.int64) & 31
            c = by_warp(g, clamp(g)).astype(np.int64)
            source, valid = _shuffle_source(mode, b, c & 31, (c >> 8) & 31)
            result = np.take_along_axis(values, source, axis=1)
            write(g, from_warps(g, result), m)
            if write_flag is not None:
                write_flag(g, from_warps(g, valid), m)

        return run

    return effect(
        ins, make, writes=(dst,), reads=(src, lane_operand, clamp_operand), collective="warp"
    )


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
    if not re.match(r"vote\.sync\.(all|any|uni|ballot)\.(pred|b32)$", ins.opcode):
        raise unknown(ins)
    mode = ins.parts[2]
    dst, src = ins.operands[:2]
    register = src.register if isinstance(src, Negated) else src

    def make(row: RowOf) -> Effect:
        read = reader(register, "p", row)
        write = writer(dst, "u" if mode == "ballot" else "p", row)

        def run(g: Any, m: Any) -> None:
            present = _present(g, m)
            value = by_warp(g, read(g), False) ^ isinstance(src, Negated)
            result: NDArray[Any]
            if mode == "ballot":
                result = np.packbits(value & present, axis=1, bitorder="little").view(np.uint32)
            elif mode == "any":
                result = np.any(value & present, axis=1, keepdims=True)
            else:
                result = np.all(value | ~present, axis=1, keepdims=True)
                if mode == "uni":
                    result |= ~np.any(value & present, axis=1, keepdims=True)
            write(g, from_warps(g, np.broadcast_to(result, (len(result), 32))), m)

        return run

    return effect(ins, make, writes=(dst,), reads=(src,), collective="warp")


def decode_elect(ins: Instruction) -> Op:
    """elect.sync: the lowest active lane of each warp."""
    if ins.opcode != "elect.sync" or not isinstance(ins.operands[0], Pair):
        raise unknown(ins)
    dst = ins.operands[0]

    def make(row: RowOf) -> Effect:
        write = writer(dst.first, "u", row)
        write_flag = writer(dst.second, "p", row)

        def run(g: Any, m: Any) -> None:
            flags = np.zeros(g.n, bool)
            leader = np.zeros(g.n, np.uint32)
            for warp, lane in one_lane_per_warp(m, g):
                flags[lane] = True
                start = max(warp * 32 - g.lo, 0)
                leader[start : (warp + 1) * 32 - g.lo] = g.lanes[lane]
            write(g, leader, m)
            write_flag(g, flags, m)

        return run

    return effect(ins, make, writes=(dst,), collective="warp")


def decode_activemask(ins: Instruction) -> Op:
    (dst,) = ins.operands

    def make(row: RowOf) -> Effect:
        write = writer(dst, "u", row)

        def run(g: Any, m: Any) -> None:
            bits = np.packbits(_present(g, m), axis=1, bitorder="little").view(np.uint32)
            write(g, from_warps(g, np.broadcast_to(bits, (len(bits), 32))), m)

        return run

    return effect(ins, make, writes=(dst,))


def decode_match(ins: Instruction) -> Op:
    if ins.opcode not in ("match.any.sync.b32", "match.any.sync.b64"):
        raise unknown(ins)
    dst, src = ins.operands[:2]
    view = "u" if ins.opcode.endswith("32") else "q"

    def make(row: RowOf) -> Effect:
        read, write = reader(src, view, row), writer(dst, "u", row)

        def run(g: Any, m: Any) -> None:
            values, present = by_warp(g, read(g)), _present(g, m)
            same = (values[:, :, None] == values[:, None, :]) & present[:, None, :]
            bits = np.packbits(same, axis=2, bitorder="little").view(np.uint32)[..., 0]
            write(g, from_warps(g, bits), m)

        return run

    return effect(ins, make, writes=(dst,), reads=(src,), collective="warp")


_REDUX: dict[str, Callable[..., Any]] = {
    "add": np.add, "min": np.minimum, "max": np.maximum,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
}  # fmt: skip


def decode_redux(ins: Instruction) -> Op:
    match = re.match(r"redux\.sync\.(add|min|max|and|or|xor)\.([usb]32)$", ins.opcode)
    if match is None:
        raise unknown(ins)
    fn = _REDUX[match[1]]
    view = "i" if match[2] == "s32" else "u"
    dst, src = ins.operands[:2]

    def make(row: RowOf) -> Effect:
        read, write = reader(src, view, row), writer(dst, view, row)

        def run(g: Any, m: Any) -> None:
            values, present = by_warp(g, read(g)), _present(g, m)
            result = np.zeros_like(values)
            for i, (lane_values, here) in enumerate(zip(values, present, strict=True)):
                if here.any():
                    result[i] = fn.reduce(lane_values[here])  # type: ignore[attr-defined]
            write(g, from_warps(g, result), m)

        return run

    return effect(ins, make, writes=(dst,), reads=(src,), collective="warp")


WARP_OPS: dict[str, Callable[[Instruction], Op]] = {
    "shfl": decode_shfl,
    "vote": decode_vote,
    "elect": decode_elect,
    "activemask": decode_activemask,
    "match": decode_match,
    "redux": decode_redux,
    "mma": decode_mma,
}
