"""Rules on registers: what wgmma.fence must order, and setmaxnreg's pool."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from .decode import Op
from .ptx_ir import Immediate, Instruction, Kernel, Register

_REGISTERS = 65536
_LIMITS = range(24, 257, 8)


class FenceRule(NamedTuple):
    """How a segment's operations meet the rule that wgmma.fence orders register accesses.

    Rows are bit masks over the 32-bit registers that some wgmma uses as accumulator or A operand.
    """

    before: int
    """Rows that a wgmma uses before the segment's first fence."""
    user: Op | None
    unfenced: tuple[tuple[Op, int], ...]
    """wgmma operations whose rows the segment itself touches with no fence between."""
    fences: bool
    after: int
    """Rows touched after the last fence."""
    touched: int
    written: int


def wgmma_rows(op: Op, row_of: dict[Register, int]) -> int:
    mask = 0
    for register in {*op.accumulators, *op.fragments}:
        mask |= 1 << row_of[register]
    return mask


class OperandRows(NamedTuple):
    """The rows that a kernel's wgmma operations use."""

    every: int
    fragments: int
    """Those of A operands."""


def operand_rows(ops: Iterable[Op], row_of: dict[Register, int]) -> OperandRows:
    every = fragments = 0
    for op in ops:
        every |= wgmma_rows(op, row_of)
        fragments |= _mask(op.fragments, row_of)
    return OperandRows(every, fragments)


def fence_rule(ops: Sequence[Op], row_of: dict[Register, int], operands: OperandRows) -> FenceRule:
    """The rule of a segment.

    Constants that accumulators get do not count: compilers place them behind the fence that the
    source has after them, and ptxas orders them.
    """
    before, user = 0, None
    fences = False
    open_rows = touched = written = 0
    unfenced = []
    constants: set[Register] = set()
    for op in ops:
        if op.accumulators:
            rows = wgmma_rows(op, row_of)
            if not fences and rows & ~before:
                before |= rows
                user = user or op
            if rows & open_rows:
                unfenced.append((op, rows & open_rows))
                open_rows &= ~rows
        elif op.ins.opcode.startswith("wgmma.fence"):
            fences = True
            open_rows = 0
        else:
            writes = _mask(op.writes, row_of)
            rows = (writes | _mask(op.reads, row_of)) & operands.every
            if _gives_constant(op, constants):
                constants.update(op.writes)
                rows &= operands.fragments
            else:
                constants.difference_update(op.writes)
            open_rows |= rows
            touched |= rows
            written |= writes & operands.every
    return FenceRule(before, user, tuple(unfenced), fences, open_rows, touched, written)


def _gives_constant(op: Op, constants: set[Register]) -> bool:
    """A `mov` of a literal, or of a register with a literal in it."""
    if op.ins.parts[0] != "mov" or op.ins.guard is not None or len(op.srcs) != 1:
        return False
    (source,) = op.srcs
    return isinstance(source, Immediate) or source in constants


def _mask(registers: Sequence[Register], row_of: dict[Register, int]) -> int:
    mask = 0
    for register in registers:
        if register.bank == "u":
            mask |= 1 << row_of[register]
    return mask


class FenceState:
    """Registers of a CTA's warpgroups that were touched since their last wgmma.fence."""

    def __init__(self, report: Callable[[Op, int], None]) -> None:
        self._report = report
        self._touched: dict[int, int] = {}

    def run(self, group: int, rule: FenceRule) -> None:
        # Before the first fence every register counts as touched.
        touched = self._touched.get(group, -1)
        if rule.before & touched and rule.user is not None:
            self._report(rule.user, rule.before & touched)
            touched &= ~rule.before
        for op, rows in rule.unfenced:
            self._report(op, rows)
        self._touched[group] = (0 if rule.fences else touched) | rule.after


def registers_at_entry(kernel: Kernel, threads: int) -> int | None:
    """Registers per thread that ptxas grants, as far as the PTX says; None where it does not.

    A kernel with setmaxnreg gets no more than the highest count that it asks for.
    """
    if kernel.maxnreg:
        return kernel.maxnreg
    if kernel.reqntid is None:
        return None
    warps = (threads + 31) // 32 * max(kernel.minnctapersm, 1)
    wanted = [i.operands[0].value for i in kernel.instructions if i.parts[0] == "setmaxnreg"]
    return min(_REGISTERS // (32 * warps) // 8 * 8, max(wanted, default=256))


class RegisterPool:
    """setmaxnreg in one CTA: legal values, whole warpgroups, and no more than was granted."""

    def __init__(self, cta: Any, granted: int | None) -> None:
        self._cta = cta
        self._granted = granted
        self._history: dict[int, list[Instruction]] = {}
        self._now: dict[int, int] = {}

    def set(self, warp: int, count: int, ins: Instruction) -> None:
        """A warp executes setmaxnreg."""
        increases = ins.parts[1] == "inc"
        self._history.setdefault(warp, []).append(ins)
        before = self._now.get(warp, self._granted)
        self._now[warp] = count
        if count not in _LIMITS:
            self._report(ins, f"{count} is no multiple of 8 in 24..256", warp)
        elif before is not None and (count < before if increases else count > before):
            verb = "raises" if increases else "lowers"
            self._report(ins, f".{ins.parts[1]} {verb} {before} registers to {count}", warp)

    def finish(self) -> None:
        """Checks that need the whole run of the CTA."""
        if not self._history:
            return
        warps = (self._cta.threads + 31) // 32
        total = 0
        for first in range(0, warps, 4):
            group = range(first, min(first + 4, warps))
            lines = {tuple(i.line for i in self._history.get(w, ())) for w in group}
            found = [w for w in group if w in self._history]
            if len(lines) > 1 or (found and len(group) < 4):
                self._report(
                    self._history[found[0]][-1],
                    f"not executed by all warps of the warpgroup, but by warps {found}",
                    found[0],
                )
            total += max(self._now.get(w, self._granted or 0) for w in group)
        groups = (warps + 3) // 4
        if self._granted is not None and total > self._granted * groups:
            last = max(self._history)
            self._report(
                self._history[last][-1],
                f"the warpgroups want {total} registers a thread in all, "
                f"{self._granted} x {groups} were granted at entry",
                last,
            )

    def _report(self, ins: Instruction, detail: str, warp: int) -> None:
        self._cta.machine.hazards.report(
            "setmaxnreg rule broken", ins, self._cta, detail, who=f"warp {warp}"
        )
