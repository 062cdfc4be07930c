"""Instructions to operations: what each reads, writes and does, or UnknownInstruction."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from .errors import UnknownInstruction
from .memory import LOCAL_BASE
from .numeric import lookup3
from .opcode_row import BANK_OF_VIEW, VIEW_OF_TYPE, Elementwise
from .ops_carry import CARRY, CARRY_ROWS, NEW_CARRY, CarryRow
from .ops_convert import PACKING, convert
from .ops_elementwise import ELEMENTWISE, setp
from .ptx_ir import Address, Immediate, Instruction, Negated, Pair, Register, Sink, Vector

RowOf = Callable[[Register], int]
# Runs on a gang's views; the mask selects its active threads, None means all.
Effect = Callable[[Any, Any], Any]


@dataclass(eq=False)
class Op:
    """One step of a segment; either elementwise (batched, generated) or an effect (called)."""

    ins: Instruction
    reads: tuple[Register, ...] = ()
    writes: tuple[Register, ...] = ()
    elementwise: Elementwise | None = None
    dst: Register | None = None
    srcs: tuple[Any, ...] = ()
    make: Callable[[RowOf], Effect] | None = None
    ordered: bool = True
    """Keeps its place among the other ordered operations."""
    alone: bool = False
    """Forms a segment of its own; its effect may block threads."""
    ends: bool = False
    """Is the last of its segment."""
    collective: str = ""
    """"warp" or "warpgroup": all live threads of it must be here."""
    members: Callable[[RowOf], Callable[[Any], Any]] | None = None
    """Makes the reader of a warp-wide operation's member masks, None for all lanes."""
    accumulators: tuple[Register, ...] = ()
    """Registers that stay in flight until a wgmma wait."""
    fragments: tuple[Register, ...] = ()
    """A operand registers of a wgmma, wanted in consecutive rows."""
    branch: int | None = None
    exit: bool = False
    yields: bool = False
    """Other threads should run after it: it may be polling memory."""


def registers_in(operand: Any) -> Iterable[Register]:
    """All registers that an operand names."""
    if isinstance(operand, Register):
        yield operand
    elif isinstance(operand, Negated):
        yield operand.register
    elif isinstance(operand, Vector):
        for item in operand.items:
            yield from registers_in(item)
    elif isinstance(operand, Pair):
        yield from registers_in(operand.first)
        yield from registers_in(operand.second)
    elif isinstance(operand, Address):
        yield from registers_in(operand.base)
        for item in operand.coordinates:
            yield from registers_in(item)


def unknown(ins: Instruction, why: str = "") -> UnknownInstruction:
    detail = f" ({why})" if why else ""
    return UnknownInstruction(f"{ins.where}: {ins.opcode} is not implemented{detail}")


def effect(
    ins: Instruction,
    make: Callable[[RowOf], Effect],
    *,
    writes: Iterable[Any] = (),
    reads: Iterable[Any] = (),
    **flags: Any,
) -> Op:
    """An effect operation from the operands it writes and reads."""
    guard = (ins.guard,) if ins.guard else ()
    return Op(
        ins,
        reads=(*guard, *(r for o in reads for r in registers_in(o))),
        writes=tuple(r for o in writes for r in registers_in(o)),
        make=make,
        **flags,
    )


def elementwise(ins: Instruction, entry: Elementwise, dst: Any, srcs: tuple[Any, ...]) -> list[Op]:
    """One elementwise operation; none where the result is dropped."""
    if isinstance(dst, Sink):
        return []
    if not isinstance(dst, Register) or dst.bank != BANK_OF_VIEW[entry.dst]:
        raise unknown(ins, f"destination {dst}")
    if len(srcs) != len(entry.srcs):
        raise unknown(ins, f"{len(srcs)} source operands")
    for source, view in zip(srcs, entry.srcs, strict=True):
        if isinstance(source, Register) and source.bank != BANK_OF_VIEW[view]:
            raise unknown(ins, f"operand {source.name} has another width")
        if isinstance(source, (Vector, Address, Pair, Sink)):
            raise unknown(ins, f"operand {source}")
    guard = (ins.guard,) if ins.guard else ()
    reads = tuple(r for s in srcs for r in registers_in(s))
    # A guarded write keeps the old value of inactive threads.
    kept = (dst,) if ins.guard else ()
    return [
        Op(ins, (*guard, *reads, *kept), (dst,), elementwise=entry, dst=dst, srcs=srcs,
           ordered=False)
    ]  # fmt: skip


def decode_elementwise(ins: Instruction) -> list[Op] | None:
    """The operations of a per-lane opcode, None where it is not one."""
    root = ins.parts[0]
    if root == "mov" and any(isinstance(o, Vector) for o in ins.operands):
        return _decode_vector_mov(ins)
    if root == "setp":
        return _decode_setp(ins)
    if root == "lop3" and ins.opcode == "lop3.b32":
        table = ins.operands[4]
        if not isinstance(table, Immediate):
            raise unknown(ins, "truth table")
        return elementwise(
            ins, Elementwise("u", "uuu", lookup3(table.value)), ins.operands[0], ins.operands[1:4]
        )
    if root == "cvt" and ins.opcode not in PACKING:
        return _decode_cvt(ins)
    if root == "cvta":
        return _decode_cvta(ins)
    if ins.opcode in CARRY_ROWS:
        return _decode_carry(ins, CARRY_ROWS[ins.opcode])
    entry = ELEMENTWISE.get(ins.opcode) or PACKING.get(ins.opcode)
    if entry is None:
        return None
    return elementwise(ins, entry, ins.operands[0], ins.operands[1:])


def _decode_carry(ins: Instruction, row: CarryRow) -> list[Op]:
    """The new carry is computed first, from the sources and the carry as they are."""
    dst, *sources = ins.operands
    srcs = (*sources, CARRY) if row.takes else tuple(sources)
    ops = []
    if row.carry is not None:
        ops += elementwise(ins, row.carry, NEW_CARRY, srcs)
    ops += elementwise(ins, row.result, dst, srcs)
    if row.carry is not None:
        ops += elementwise(ins, ELEMENTWISE["mov.pred"], CARRY, (NEW_CARRY,))
    return ops


_CVTA = re.compile(
    r"cvta(\.to)?\.(global|shared|shared::cta|shared::cluster|local|const|param)\.u(32|64)$"
)


def _decode_cvta(ins: Instruction) -> list[Op]:
    """Generic and window addresses are the same numbers, but for local memory."""
    match = _CVTA.match(ins.opcode)
    if match is None:
        raise unknown(ins)
    entry = ELEMENTWISE[f"mov.b{match[3]}"]
    if match[2] == "local" and not match[1]:
        entry = Elementwise("q", "q", _to_generic_local)
    return elementwise(ins, entry, ins.operands[0], ins.operands[1:])


def _to_generic_local(offset: Any) -> Any:
    return offset + np.uint64(LOCAL_BASE)


def _decode_setp(ins: Instruction) -> list[Op]:
    direct = setp(ins.parts, inverted=False)
    inverted = setp(ins.parts, inverted=True)
    if direct is None or inverted is None or VIEW_OF_TYPE.get(ins.parts[-1]) is None:
        raise unknown(ins, "comparison or type")
    dst, *srcs = ins.operands
    if not isinstance(dst, Pair):
        return elementwise(ins, direct, dst, tuple(srcs))
    if dst.first in list(registers_in(Vector(tuple(srcs)))):
        raise unknown(ins, "first destination is also a source")
    return [
        *elementwise(ins, direct, dst.first, tuple(srcs)),
        *elementwise(ins, inverted, dst.second, tuple(srcs)),
    ]


def _decode_cvt(ins: Instruction) -> list[Op]:
    if len(ins.operands) != 2 or len(ins.parts) < 3:
        raise unknown(ins)
    dst, src = ins.operands
    if isinstance(dst, Sink):
        return []
    if not isinstance(src, (Register, Immediate)):
        raise unknown(ins, f"operand {src}")
    src_bank = src.bank if isinstance(src, Register) else BANK_OF_VIEW[VIEW_OF_TYPE[ins.parts[-1]]]
    entry = convert(ins, dst.bank, src_bank)
    if entry is None:
        raise unknown(ins, "conversion")
    return elementwise(ins, entry, dst, (src,))


def _decode_vector_mov(ins: Instruction) -> list[Op]:
    """mov.b32/b64 between one register and a brace list of halves or quarters."""
    dst, src = ins.operands
    whole = ins.parts[1]
    bits = int(whole[1:])
    if whole not in ("b32", "b64"):
        raise unknown(ins)
    view = "u" if bits == 32 else "q"
    if isinstance(dst, Vector):
        part = bits // len(dst.items)
        part_view = {16: "h", 32: "u"}.get(part)
        if part_view is None:
            raise unknown(ins, "vector width")
        if src in dst.items:
            raise unknown(ins, "source is also a destination")
        ops = []
        for i, item in enumerate(dst.items):
            entry = Elementwise(part_view, view, _extractor(part_view, i * part))
            ops += elementwise(ins, entry, item, (src,))
        return ops
    part = bits // len(src.items)
    part_view = {16: "h", 32: "u"}.get(part)
    if part_view is None:
        raise unknown(ins, "vector width")
    entry = Elementwise(view, part_view * len(src.items), _packer(view, part))
    return elementwise(ins, entry, dst, src.items)


@cache
def _extractor(part_view: str, shift: int) -> Callable[[Any], Any]:
    kind: Any = {"h": np.uint16, "u": np.uint32}[part_view]

    def run(a: Any) -> Any:
        return (a >> a.dtype.type(shift)).astype(kind)

    return run


@cache
def _packer(view: str, part: int) -> Callable[..., Any]:
    kind: Any = {"u": np.uint32, "q": np.uint64}[view]

    def run(*items: Any) -> Any:
        result = np.asarray(items[0]).astype(kind)
        for i, item in enumerate(items[1:], 1):
            result = result | (np.asarray(item).astype(kind) << kind(i * part))
        return result

    return run
