"""Kernels with synchronisation broken: what the emulator, and a test suite worth its name, notice.

A `Fault` is a kind of mutation of PTX lines; a `Subject` is a kernel and a check of its results.
To put another kernel to the test, add a `Subject`: see `tests/support/mutation_subjects.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import pytest

import hopperflash
import hopperflash.runtime.launch as launch_module
from hopperflash.emulator import EmulationError

Change = Callable[[re.Match[str]], str]
RUNS = (("lazy", 0), ("eager", 0), ("random", 0), ("random", 1))


def _delete(match: re.Match[str]) -> str:
    return ""


def _replace(text: str) -> Change:
    return lambda match: text


def _operand(transform: str) -> Change:
    """Computes group "value" anew: `transform` is PTX from {value} to the register `fault`."""

    def change(match: re.Match[str]) -> str:
        start, end = match.span("value")
        line = match.string
        compute = transform.format(value=match["value"])
        return f"{{ .reg .b32 fault; {compute} {line[:start]}fault{line[end:]} }}"

    return change


def _one_more_group(match: re.Match[str]) -> str:
    start, end = match.span("value")
    return f"{match.string[:start]}{int(match['value']) + 1}{match.string[end:]}"


def _without_release(match: re.Match[str]) -> str:
    line = match.string
    return "" if "fence" in line else line.replace("release", "relaxed")


_ALL_LANES = "setp.eq.u32 {flag}, 0, 0; mov.b32 {lane}, 0;"


def _every_lane(match: re.Match[str]) -> str:
    return _ALL_LANES.format(flag=match["flag"], lane=match["lane"])


@dataclass(frozen=True)
class Fault:
    """A kind of fault: the PTX lines it can strike and what becomes of one."""

    name: str
    pattern: str
    change: Change = field(default=_delete, repr=False)

    def sites(self, ptx: str) -> list[int]:
        """Line indices where the fault can be seeded."""
        return [i for i, line in enumerate(ptx.splitlines()) if re.search(self.pattern, line)]

    def seed(self, ptx: str, sites: list[int]) -> str:
        """The PTX with the instructions on these lines broken."""
        lines = ptx.splitlines()
        for site in sites:
            match = re.search(self.pattern, lines[site])
            if match is None:
                # Not an AssertionError, which would pass for a wrong result.
                raise ValueError(f"{self.name} cannot strike {lines[site]!r}: another kernel?")
            lines[site] = self.change(match)
        return "\n".join(lines)


_GUARD = r"^\s*(?:@\S+\s+)?"
_VALUE = r"(?P<value>[^,;\s]+)"

FAULTS = (
    Fault("wgmma-wait", _GUARD + r"wgmma\.wait_group"),
    Fault("wgmma-wait-for-older", _GUARD + r"wgmma\.wait_group\S*\s+" + _VALUE, _one_more_group),
    Fault("wgmma-fence", _GUARD + r"wgmma\.fence"),
    Fault("wgmma-commit", _GUARD + r"wgmma\.commit_group"),
    Fault("mbarrier-wait", _GUARD + r"mbarrier\.try_wait", _replace("setp.eq.u32 P1, 0, 0;")),
    Fault(
        "mbarrier-parity",
        _GUARD + r"mbarrier\.try_wait\S*\s+\w+, \[[^]]*\], " + _VALUE,
        _operand("xor.b32 fault, {value}, 1;"),
    ),
    Fault("mbarrier-arrive", _GUARD + r"mbarrier\.arrive\.(?!expect_tx)"),
    Fault("mbarrier-arrive-expect-tx", _GUARD + r"mbarrier\.arrive\.expect_tx"),
    Fault(
        "expect-tx-half",
        _GUARD + r"mbarrier\.arrive\.expect_tx[^;]*\], " + _VALUE,
        _operand("shr.u32 fault, {value}, 1;"),
    ),
    Fault(
        "expect-tx-more",
        _GUARD + r"mbarrier\.arrive\.expect_tx[^;]*\], " + _VALUE,
        _operand("add.u32 fault, {value}, 16;"),
    ),
    Fault("mbarrier-init", _GUARD + r"mbarrier\.init"),
    Fault(
        "mbarrier-init-count",
        _GUARD + r"mbarrier\.init[^;]*\], " + _VALUE,
        _operand("add.u32 fault, {value}, 1;"),
    ),
    Fault(
        "mbarrier-init-fewer",
        _GUARD + r"mbarrier\.init[^;]*\], " + _VALUE,
        _operand("sub.u32 fault, {value}, 1;"),
    ),
    Fault("mbarrier-init-fence", _GUARD + r"fence\.mbarrier_init"),
    Fault("proxy-fence", _GUARD + r"fence\.proxy\.async"),
    Fault("named-barrier-sync", _GUARD + r"(?:bar|barrier)(?:\.cta)?\.sync\S*\s+(?!0;)[^;\s]"),
    Fault("named-barrier-arrive", _GUARD + r"(?:bar|barrier)(?:\.cta)?\.arrive"),
    Fault("syncthreads", _GUARD + r"(?:bar|barrier)(?:\.cta)?\.sync\S*\s+0;"),
    Fault("warp-barrier", _GUARD + r"bar\.warp\.sync"),
    Fault("cluster-arrive", _GUARD + r"barrier\.cluster\.arrive"),
    Fault("cluster-wait", _GUARD + r"barrier\.cluster\.wait"),
    Fault("bulk-commit", _GUARD + r"cp\.async\.bulk\.commit_group"),
    Fault("bulk-wait", _GUARD + r"cp\.async\.bulk\.wait_group"),
    Fault(
        "bulk-wait-for-older", _GUARD + r"cp\.async\.bulk\.wait_group\S*\s+" + _VALUE,
        _one_more_group,
    ),
    Fault(
        "bulk-wait-for-reads", _GUARD + r"cp\.async\.bulk\.wait_group\s+" + _VALUE,
        lambda match: match.string.replace("wait_group", "wait_group.read"),
    ),
    Fault("copy-commit", _GUARD + r"cp\.async\.commit_group"),
    Fault("copy-wait", _GUARD + r"cp\.async\.wait_(?:group|all)"),
    Fault("copy-wait-for-older", _GUARD + r"cp\.async\.wait_group\s+" + _VALUE, _one_more_group),
    Fault("elect", r"elect\.sync\s+(?P<lane>[%\w]+)\|(?P<flag>%\w+)", _every_lane),
    Fault("griddepcontrol-wait", _GUARD + r"griddepcontrol\.wait"),
    Fault(
        "global-release", _GUARD + r"(?:fence\.acq_rel|(?:red|st|atom)\.(?:global\.)?\S*release)",
        _without_release,
    ),
    Fault("global-acquire", _GUARD + r"(?:ld|atom)\.(?:global\.)?\S*acquire",
          lambda match: match.string.replace("acquire", "relaxed")),
)  # fmt: skip


@dataclass(frozen=True)
class Subject:
    """A kernel of the project and a call that launches it and checks its results."""

    name: str
    kernel: str
    """Class of the kernel; other kernels of the call stay as they are."""
    check: Callable[[], None] = field(repr=False)
    long_check: Callable[[], None] | None = field(default=None, repr=False)
    """A longer run, for faults that need many rounds of a pipeline to show."""
    arch: str = "sm_90a"
    hazards: str = "full"
    faults: tuple[Fault, ...] = field(default=FAULTS, repr=False)


class MutantKernel:
    """A compiled kernel that executes other PTX; everything else is the original's."""

    def __init__(self, compiled: Any, ptx: str) -> None:
        self._compiled = compiled
        self._hopperflash_emulation: Any = None  # the original's parsed module must not be found
        self.__ptx__ = ptx

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiled, name)

    def executed_lines(self) -> set[int]:
        """Line indices of the PTX that a launch executed."""
        kernels = self._hopperflash_emulation.module.kernels.values()
        return {
            op.ins.line - 1
            for kernel in kernels
            for segment in kernel.program.segments
            if segment.executed
            for op in (*segment.ops, *([segment.branch_op] if segment.branch_op else []))
        }


@contextmanager
def mutated(kernel: str, mutate: Callable[[str], str]) -> Iterator[list[MutantKernel]]:
    """Inside, launches of the kernel class execute `mutate(PTX)`; yields the kernels launched."""
    original = launch_module.compile_kernel
    launched: list[MutantKernel] = []

    def compile_mutant(spec: Any) -> Any:
        compiled = original(spec)
        if spec.ref.name != kernel:
            return compiled
        launched.append(MutantKernel(compiled, mutate(compiled.artifacts.PTX)))
        return launched[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch_module, "compile_kernel", compile_mutant)
        yield launched


@dataclass(frozen=True)
class Anatomy:
    """A subject's PTX and the lines of it that its check executes."""

    ptx: str
    executed: frozenset[int]

    def sites(self, fault: Fault) -> list[int]:
        """Executed sites of a fault."""
        return [site for site in fault.sites(self.ptx) if site in self.executed]


def dissect(subject: Subject) -> Anatomy:
    """Runs the subject unbroken, which must be right and clean."""
    with (
        mutated(subject.kernel, lambda ptx: ptx) as launched,
        hopperflash.emulate(subject.arch, schedule="lazy", hazards=subject.hazards) as run,
    ):
        subject.check()
    assert run.hazards == []
    executed: set[int] = set()
    for kernel in launched:
        executed |= kernel.executed_lines()
    return Anatomy(launched[0].__ptx__, frozenset(executed))


class _Hazard(Exception):
    """One was reported: the rest of the run has nothing to add."""


def noticed(subject: Subject, fault: Fault, sites: list[int]) -> str:
    """How a run with the fault at these sites comes to notice; "" where none does."""
    checks = [subject.check] + ([subject.long_check] if subject.long_check else [])
    options = {"hazards": subject.hazards}

    def stop_at_a_hazard(done: int, ctas: int) -> None:
        if run.hazards:
            raise _Hazard

    for check, (schedule, seed) in product(checks, RUNS):
        with mutated(subject.kernel, lambda ptx: fault.seed(ptx, sites)):
            try:
                with hopperflash.emulate(
                    subject.arch, schedule=schedule, seed=seed, progress=stop_at_a_hazard, **options
                ) as run:
                    check()
            except _Hazard:
                return run.hazards[0]
            except EmulationError as error:
                return f"{type(error).__name__}: {str(error).splitlines()[0]}"
            except AssertionError:
                return run.hazards[0] if run.hazards else f"wrong result ({schedule})"
        if run.hazards:
            return run.hazards[0]
    return ""
