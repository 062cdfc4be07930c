"""tensormap.*: edits of a tensor map in memory, as grouped kernels do them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from .decode import Effect, Op, RowOf, effect, unknown
from .errors import InvalidDescriptor
from .operands import active, address_reader, one_lane_per_warp, reader, scalar_at
from .ptx_ir import Immediate, Instruction

_REPLACE = re.compile(
    r"tensormap\.replace\.tile\.(?P<field>\w+)(\.(?P<space>global|shared|shared::cta))?"
    r"\.b1024\.(b32|b64)$"
)
_COPY = re.compile(
    r"tensormap\.cp_fenceproxy\.global\.shared(::cta)?\.tensormap::generic\.release"
    r"\.(cta|cluster|gpu|sys)\.sync\.aligned$"
)
_MAP_BYTES = 128
_INDEXED = ("box_dim", "global_dim", "global_stride", "element_stride")


def _bits(word: int, shift: int, width: int, value: int) -> int:
    mask = ((1 << width) - 1) << shift
    return word & ~mask | (value << shift) & mask


def replace_field(words: list[int], field: str, ordinal: int, value: int) -> None:
    """Changes a field of a descriptor, given as 16 words of 64 bits; see `tensor_map.decode`."""
    match field:
        case "global_address":
            words[0] = value
        case "rank":
            words[1] = _bits(words[1], 4, 3, value)
        case "elemtype":
            words[1] = _bits(words[1], 7, 4, value)
        case "interleave_layout":
            words[1] = _bits(words[1], 11, 2, value)
        case "swizzle_mode":
            words[1] = _bits(words[1], 13, 2, value)
        case "fill_mode":
            words[1] = _bits(words[1], 15, 1, value)
        case "global_stride":
            _replace_stride(words, ordinal, value >> 4)
        case "global_dim":
            words[4 + ordinal // 2] = _bits(
                words[4 + ordinal // 2], 32 * (ordinal % 2), 32, value - 1
            )
        case "element_stride":
            words[6] = _bits(words[6], 32 + 3 * ordinal, 3, value - 1)
        case "box_dim":
            position = 55 + ordinal
            words[position // 8] = _bits(words[position // 8], 8 * (position % 8), 8, value - 1)
        case _:
            raise InvalidDescriptor(f"tensormap.replace of {field} is not emulated")


def _replace_stride(words: list[int], ordinal: int, pieces: int) -> None:
    """Stride of dimension `ordinal` + 1 in 16-byte pieces: 32 low bits, and 4 above them."""
    position = 32 * (3 + ordinal)
    words[position // 64] = _bits(words[position // 64], position % 64, 32, pieces & 0xFFFFFFFF)
    words[3] = _bits(words[3], 32 + 4 * ordinal, 4, pieces >> 32)


def decode_replace(ins: Instruction) -> Op:
    match = _REPLACE.match(ins.opcode)
    if match is None:
        raise unknown(ins)
    field, space = match["field"], (match["space"] or "").partition("::")[0]
    address, *rest = ins.operands
    ordinal = 0
    if field in _INDEXED:
        if not isinstance(rest[0], Immediate):
            raise unknown(ins, "ordinal")
        ordinal = rest.pop(0).value
    (value,) = rest

    def make(row: RowOf) -> Effect:
        at = address_reader(address, row)
        read = reader(value, "q" if ins.opcode.endswith("b64") else "u", row)

        def run(g: Any, m: Any) -> None:
            for lane in active(m, g):
                addresses = np.arange(0, _MAP_BYTES, 8, dtype=np.int64) + at(g)[lane]
                lanes = np.full(len(addresses), lane)
                raw = g.cta.load(space, addresses, 8, 1, g, lanes, ins)
                words = [int(word) for word in raw[0]]
                replace_field(words, field, ordinal, scalar_at(read(g), int(lane)))
                g.cta.store(space, addresses, np.array([words], np.uint64), g, lanes, ins)

        return run

    return effect(ins, make, reads=(address, value))


def decode_copy(ins: Instruction) -> Op:
    """tensormap.cp_fenceproxy: a warp copies a map from shared to global memory."""
    size = ins.operands[2]
    if not _COPY.match(ins.opcode) or not isinstance(size, Immediate) or size.value != _MAP_BYTES:
        raise unknown(ins)
    dst, src, _ = ins.operands

    def make(row: RowOf) -> Effect:
        to, frm = address_reader(dst, row), address_reader(src, row)
        offsets = np.arange(0, _MAP_BYTES, 8, dtype=np.int64)

        def run(g: Any, m: Any) -> None:
            for _, lane in one_lane_per_warp(m, g):
                lanes = np.full(len(offsets), lane)
                words = g.cta.load("shared", offsets + frm(g)[lane], 8, 1, g, lanes, ins)
                g.cta.store("global", offsets + to(g)[lane], words, g, lanes, ins)

        return run

    return effect(ins, make, reads=(dst, src), collective="warp")


TENSORMAP_OPS: dict[str, Callable[[Instruction], Op]] = {
    "tensormap.replace": decode_replace,
    "tensormap.cp_fenceproxy": decode_copy,
}
