"""Kernels to programs: segments of straight-line code, each a generated Python function."""

from __future__ import annotations

import itertools
import linecache
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .codegen_values import DTYPE, immediate
from .decode import Op, RowOf
from .errors import EmulationError
from .instruction_classes import class_of
from .memory import SHARED_BASE
from .opcode_row import Elementwise
from .operations import decode
from .ptx_ir import Immediate, Kernel, Negated, Register, Special, Symbol
from .register_rules import FenceRule, OperandRows, fence_rule, operand_rows
from .special import read_special

Function = Callable[[Any, Any], Any]


@dataclass(eq=False)
class Segment:
    """A run of operations that threads execute together, and how it ends."""

    index: int
    ops: list[Op]
    batches: list[list[Op]] = field(default_factory=list)
    collective: str = ""
    members: Callable[[Any], Any] | None = None
    """Reads the member masks of the first operation; None where all lanes of a warp must come."""
    branch: int | None = None
    branch_op: Op | None = None
    exit: bool = False
    blocking: bool = False
    yields: bool = False
    acts: bool = False
    """Does something that other threads may see; a poll or a pure computation does not."""
    rule: FenceRule | None = None
    """Where it uses or touches registers of a wgmma."""
    counts: dict[str, int] = field(default_factory=dict)
    """Instructions by opcode root."""
    classes: dict[str, int] = field(default_factory=dict)
    instructions: int = 0
    mufu: int = 0
    executed: bool = False
    """Whether any launch came here."""
    warps_executed: int = 0
    lanes_executed: int = 0
    functions: dict[bool, Function] = field(default_factory=dict)
    line_ops: dict[bool, dict[int, Op]] = field(default_factory=dict)

    @property
    def first(self) -> Op | None:
        return self.ops[0] if self.ops else self.branch_op


@dataclass(eq=False)
class Program:
    """The compiled form of a kernel, reused by every launch of it."""

    kernel: Kernel
    segments: list[Segment]
    rows: dict[str, int]
    row_of: dict[Register, int]
    shared_static: int
    symbols: dict[str, int]
    local_bytes: int
    register_files: dict[int, list[Any]] = field(default_factory=dict)


def program_of(kernel: Kernel) -> Program:
    """Decode a kernel once; refuses unknown instructions."""
    if kernel.program is None:
        kernel.program = _compile(kernel)
    program: Program = kernel.program
    return program


def _compile(kernel: Kernel) -> Program:
    decoded = [decode(ins) for ins in kernel.instructions]
    segments = _split(kernel, decoded)
    symbols, shared_static, local_bytes = _place_variables(kernel)
    for segment in segments:
        segment.batches = _schedule(segment.ops)
    row_of, rows = _allocate_rows(segments)
    operands = operand_rows((op for segment in segments for op in segment.ops), row_of)
    for segment in segments:
        _summarise(segment, row_of, operands)
    return Program(kernel, segments, rows, row_of, shared_static, symbols, local_bytes)


def _place_variables(kernel: Kernel) -> tuple[dict[str, int], int, int]:
    """Addresses of shared and local variables; dynamic shared memory starts 1024-aligned."""
    symbols: dict[str, int] = {}
    shared = local = 0
    for v in kernel.variables.values():
        if v.space == "shared" and v.size:
            shared = (shared + v.align - 1) // v.align * v.align
            symbols[v.name] = SHARED_BASE + shared
            shared += v.size
        elif v.space == "local":
            local = (local + v.align - 1) // v.align * v.align
            symbols[v.name] = local
            local += v.size
        elif v.space in ("global", "const"):
            symbols[v.name] = int(kernel.arrays[v.name].ctypes.data)
    shared = (shared + 1023) // 1024 * 1024
    for v in kernel.variables.values():
        if v.space == "shared" and not v.size:
            symbols[v.name] = SHARED_BASE + shared
    return symbols, shared, (local + 15) // 16 * 16


def _split(kernel: Kernel, decoded: list[list[Op]]) -> list[Segment]:
    leaders = {op.branch for ops in decoded for op in ops if op.branch is not None}
    starts: dict[int, int] = {}
    segments: list[Segment] = []
    current: list[Op] = []
    in_flight: set[Register] = set()
    fragments: set[Register] = set()

    def close(**attributes: Any) -> None:
        nonlocal current, in_flight, fragments
        segment = Segment(len(segments), current, **attributes)
        segments.append(segment)
        current, in_flight, fragments = [], set(), set()

    for index, ops in enumerate(decoded):
        if index in leaders:
            if current:
                close()
            starts[index] = len(segments)
        for op in ops:
            if op.branch is not None:
                close(branch=op.branch, branch_op=op)
                continue
            if op.exit:
                close(exit=True, branch_op=op)
                continue
            touches = not op.accumulators and not (
                in_flight.isdisjoint((*op.reads, *op.writes)) and fragments.isdisjoint(op.writes)
            )
            if current and (op.alone or touches or _needs_convergence(op, current)):
                close()
            current.append(op)
            in_flight.update(op.accumulators)
            fragments.update(op.fragments)
            if op.alone:
                close(blocking=True)
            elif op.ends:
                close()
    if current or len(decoded) in leaders:
        starts[len(decoded)] = len(segments)
        close(exit=True)
    for segment in segments:
        if segment.branch is not None:
            segment.branch = starts[segment.branch]
    return segments


def _needs_convergence(op: Op, current: list[Op]) -> bool:
    """A collective must not share a segment with effects that threads elsewhere may wait for.

    One with member masks starts a segment: its masks must be known before it runs.
    """
    if op.members is not None:
        return True
    return bool(op.collective) and any(o.ordered and o.collective != op.collective for o in current)


def _schedule(ops: list[Op]) -> list[list[Op]]:
    """Group independent elementwise operations of one kind at the same dependency depth."""
    written: dict[Register, int] = {}
    read: dict[Register, int] = {}
    last_ordered = -1
    levels: dict[tuple[int, Any], list[Op]] = {}
    for number, op in enumerate(ops):
        level = 0
        for r in op.reads:
            level = max(level, written.get(r, -1) + 1)
        for w in op.writes:
            level = max(level, written.get(w, -1) + 1, read.get(w, -1) + 1)
        if op.ordered:
            level = last_ordered = max(level, last_ordered + 1)
        for r in op.reads:
            read[r] = max(read.get(r, -1), level)
        for w in op.writes:
            written[w] = level
        levels.setdefault((level, _batch_key(op, number)), []).append(op)
    order = sorted(levels.items(), key=lambda item: item[0][0])
    return [batch for _, batch in order]


def _batch_key(op: Op, number: int) -> Any:
    if op.elementwise is None:
        return number
    shape = tuple(
        "r" if isinstance(s, Register) else "i" if isinstance(s, Immediate) else s for s in op.srcs
    )
    return (id(op.elementwise.fn), op.elementwise.dst, shape, op.ins.guard, op.ins.guard_negated)


def _allocate_rows(segments: list[Segment]) -> tuple[dict[Register, int], dict[str, int]]:
    """Rows in the order that makes batches and matrix fragments contiguous."""
    row_of: dict[Register, int] = {}
    rows: dict[str, int] = {}

    def place(register: Register) -> None:
        if register not in row_of:
            row_of[register] = rows.get(register.bank, 0)
            rows[register.bank] = row_of[register] + 1

    for attribute in ("accumulators", "fragments"):
        for segment in segments:
            for op in segment.ops:
                for register in getattr(op, attribute):
                    place(register)
    for segment in segments:
        for batch in segment.batches:
            for op in batch:
                for register in op.writes:
                    place(register)
    for segment in segments:
        for op in (*segment.ops, *([segment.branch_op] if segment.branch_op else [])):
            for register in (*op.reads, *((op.ins.guard,) if op.ins.guard else ())):
                place(register)
    return row_of, rows


def _summarise(segment: Segment, row_of: dict[Register, int], operands: OperandRows) -> None:
    counted: set[int] = set()
    ops = segment.ops + ([segment.branch_op] if segment.branch_op else [])
    for op in ops:
        if op.collective and segment.collective != "warpgroup":
            segment.collective = op.collective
        if op.members is not None:
            segment.members = op.members(row_of.__getitem__)
        segment.yields |= op.yields
        segment.acts |= op.make is not None and op.ordered and not op.alone
        if id(op.ins) in counted:
            continue
        counted.add(id(op.ins))
        root = op.ins.parts[0]
        segment.counts[root] = segment.counts.get(root, 0) + 1
        kind = class_of(op.ins)
        segment.classes[kind] = segment.classes.get(kind, 0) + 1
        segment.mufu += ".approx" in op.ins.opcode
    segment.instructions = len(counted)
    if operands.every:
        rule = fence_rule(ops, row_of, operands)
        segment.rule = rule if rule.before or rule.fences or rule.touched else None


class _Writer:
    """Writes the source of one segment function."""

    def __init__(self, program: Program, masked: bool) -> None:
        self.program = program
        self.masked = masked
        self.lines: list[str] = []
        self.line_ops: dict[int, Op] = {}
        self.names: dict[str, Any] = {
            "copyto": np.copyto, "special": read_special, "uint64": np.uint64,
            "uint32": np.uint32,
        }  # fmt: skip
        self.constants: dict[Any, str] = {}

    def constant(self, key: Any, value: Any) -> str:
        name = self.constants.get(key)
        if name is None:
            name = self.constants[key] = f"k{len(self.constants)}"
            self.names[name] = value
        return name

    def emit(self, text: str, op: Op) -> None:
        self.lines.append("    " + text)
        # The def line is line 1.
        self.line_ops[len(self.lines) + 1] = op

    def batch(self, batch: list[Op]) -> None:
        op = batch[0]
        where = self._where(op)
        if op.elementwise is None:
            assert op.make is not None
            row_of: RowOf = self.program.row_of.__getitem__
            fn = self.constant(("effect", id(op)), op.make(row_of))
            self.emit(f"{fn}(g, {where or 'None'})", op)
            return
        self._elementwise(batch, where)

    def _where(self, op: Op) -> str:
        guard = ""
        if op.ins.guard is not None:
            row = self.program.row_of[op.ins.guard]
            guard = f"~g.p[{row}]" if op.ins.guard_negated else f"g.p[{row}]"
        if not self.masked:
            return guard
        return f"m & {guard}" if guard else "m"

    def _elementwise(self, batch: list[Op], where: str) -> None:
        op = batch[0]
        entry = op.elementwise
        assert entry is not None
        fn = self.constant(("fn", id(entry.fn)), entry.fn)
        args = ", ".join(
            self._source([o.srcs[i] for o in batch], view) for i, view in enumerate(entry.srcs)
        )
        dst_rows = [self.program.row_of[o.dst] for o in batch if o.dst is not None]
        dst, fancy = self._rows(entry.dst, dst_rows)
        self._assign(entry, f"{fn}({args}", dst, fancy, where, op)

    def _assign(
        self, entry: Elementwise, call: str, dst: str, fancy: bool, where: str, op: Op
    ) -> None:
        if not where:
            if entry.ufunc and not fancy:
                self.emit(f"{call}, out={dst})", op)
            elif fancy or ":" in dst:
                self.emit(f"{dst} = {call})", op)
            else:
                self.emit(f"{dst}[...] = {call})", op)
        elif fancy:
            self.emit(f"t = {dst}", op)
            self.emit(f"copyto(t, {call}), 'unsafe', {where})", op)
            self.emit(f"{dst} = t", op)
        elif entry.ufunc:
            self.emit(f"{call}, out={dst}, where={where})", op)
        else:
            self.emit(f"copyto({dst}, {call}), 'unsafe', {where})", op)

    def _rows(self, view: str, rows: list[int]) -> tuple[str, bool]:
        if len(set(rows)) == 1:
            return f"g.{view}[{rows[0]}]", False
        step = rows[1] - rows[0]
        if step > 0 and all(b - a == step for a, b in itertools.pairwise(rows)):
            stride = f":{step}" if step > 1 else ""
            return f"g.{view.upper()}[{rows[0]}:{rows[-1] + 1}{stride}]", False
        index = self.constant(("rows", tuple(rows)), np.array(rows))
        return f"g.{view.upper()}[{index}]", True

    def _source(self, operands: list[Any], view: str) -> str:
        first = operands[0]
        if isinstance(first, Register):
            return self._rows(view, [self.program.row_of[o] for o in operands])[0]
        if isinstance(first, Immediate):
            values = [immediate(o, view) for o in operands]
            if len({v.tobytes() for v in values}) == 1:
                return self.constant(("imm", view, values[0].tobytes()), values[0])
            column = np.array(values).reshape(-1, 1)
            return self.constant(("column", view, column.tobytes()), column)
        if isinstance(first, Negated):
            return f"~g.p[{self.program.row_of[first.register]}]"
        if isinstance(first, Special):
            return f"special(g, {first.name!r}, {view!r})"
        if isinstance(first, Symbol):
            return self._symbol(first, view)
        raise EmulationError(f"operand {first} cannot be a value")

    def _symbol(self, symbol: Symbol, view: str) -> str:
        if symbol.name in self.program.symbols:
            value = DTYPE[view](self.program.symbols[symbol.name] + symbol.offset)
            return self.constant(("symbol", view, symbol), value)
        offset = param_offset(self.program.kernel, symbol)
        return f"uint64(g.cta.machine.param_base + {offset})"


def param_offset(kernel: Kernel, symbol: Symbol) -> int:
    """Offset of a parameter symbol in the parameter buffer."""
    return next(p.offset for p in kernel.params if p.name == symbol.name) + symbol.offset


def function_of(program: Program, segment: Segment, masked: bool) -> Function:
    """The generated function of a segment, for full or partly active gangs."""
    fn = segment.functions.get(masked)
    if fn is None:
        writer = _Writer(program, masked)
        for batch in segment.batches:
            writer.batch(batch)
        if segment.blocking:
            writer.lines[-1] = writer.lines[-1].replace("    ", "    return ", 1)
        source = "def segment(g, m):\n" + "\n".join(writer.lines or ["    pass"]) + "\n"
        filename = f"<{program.kernel.name} segment {segment.index} {masked}>"
        exec(compile(source, filename, "exec"), writer.names)
        # Lets tracebacks and debuggers show the generated lines.
        linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
        fn = writer.names["segment"]
        segment.functions[masked] = fn
        segment.line_ops[masked] = writer.line_ops
    return fn
