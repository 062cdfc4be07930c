"""Searches the tiles of a kernel: enumerates what the plan finds feasible, compiles it, drops what
spills or serialises wgmma, and ranks the rest by the model; no GPU is needed.

    python -m profiling.search --head-dim 128 --mask causal --direction forward [--json|--markdown]
    python -m profiling.search --check [--write] [--head-dim 128] [--direction forward]

Ranked by clocks that an SM needs for a visible pair, from the machine code (docs/performance.md),
and where these are equal by instructions for a score. --check asks for every row of the table of
an architecture whether it is the search's first choice, or as good within the model's error;
--write puts today's date on those rows of `plan/tiles_sm90.py` that are.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from multiprocessing import get_context
from typing import Any

from hopperflash.analysis import KernelReport, report
from hopperflash.errors import CompileError
from hopperflash.plan import ArchSpec, KernelSpec, arch_of
from hopperflash.plan.clusters import L2_AT_EASE, in_cluster
from hopperflash.plan.config import (
    BackwardConfig,
    ForwardConfig,
    ForwardConfigSm80,
    MainConfig,
    Scheduler,
)
from hopperflash.plan.scheduling import walking
from hopperflash.plan.tiles import HEAD_DIMS
from hopperflash.plan.units import HOPPER
from hopperflash.problem import DType, MaskKind, Signature
from profiling.candidates import Candidate, enumerate_rows, planned_row, table_of
from profiling.compare_sass import SEQLEN, WINDOW_LEFT, Case, Side, clocks_per_thousand

LIMIT = 16
FEWER = (("dq",), ("dk", "dv"))  # gradients
GROUP = 3  # query heads in the rows of a tile, where a forward is compiled at its heaviest


@dataclass(frozen=True)
class Question:
    """What a row is wanted for; `plain`: only problems that are (`tiles_sm90.is_plain`)."""

    case: Case
    arch: ArchSpec
    plain: bool = False

    def spec(self, candidate: Candidate) -> KernelSpec:
        """The row's kernel in bf16 with nothing else to do: what the model ranks."""
        kernel = table_of(self.case.direction, self.arch).kernel
        signature = Signature(DType.BFLOAT16, self.case.mask)
        return KernelSpec(kernel, candidate.config, signature, self.arch.name)

    def heaviest(self, candidate: Candidate) -> list[KernelSpec]:
        """The row's kernels with all that they may have to do, for one tile or several, and of a
        backward that is not plain with fewer gradients."""
        config = candidate.config
        if isinstance(config, (ForwardConfig, BackwardConfig)):
            # Tiles of packed sequences are not paired.
            config = in_cluster(config, 1)
        if isinstance(config, (ForwardConfig, ForwardConfigSm80)):
            return self._each(_with_walks(replace(config, group=GROUP)), capped=(True,))
        in_order = replace(config, deterministic=True)
        fewer = [replace(config, gradients=gradients) for gradients in FEWER]
        if self.plain:
            packed = self._each([config], capped=(False,))
            return packed + self._each([in_order, walking(config)], capped=(False,), packed=False)
        # With a cap ptxas may find registers that it does not find without.
        return self._each([config, *_with_walks(in_order), *fewer], capped=(True, False))

    def _each(
        self, configs: Sequence[MainConfig], *, capped: Sequence[bool], packed: bool = True
    ) -> list[KernelSpec]:
        kernel = table_of(self.case.direction, self.arch).kernel
        signatures = [
            Signature(dtype, self.case.mask, cap, packed) for dtype, cap in product(DType, capped)
        ]
        return [KernelSpec(kernel, *pair, self.arch.name) for pair in product(configs, signatures)]


def _with_walks(config: MainConfig) -> list[MainConfig]:
    """The configuration for one tile, and those for several that it may get."""
    schedulers = [Scheduler.PERSISTENT]
    if isinstance(config, ForwardConfig):
        schedulers.append(Scheduler.DYNAMIC)
    return [config, *(walking(config, scheduler) for scheduler in schedulers)]


@dataclass(frozen=True)
class Found:
    """A candidate as compiled; `faults` are why it is dropped, and there is no `side` where it did
    not compile."""

    candidate: Candidate
    side: Side | None
    registers: int = 0
    shared_bytes: int = 0
    faults: tuple[str, ...] = ()

    @property
    def rank(self) -> tuple[float, float, str]:
        """What the model orders by; the name makes the order one."""
        assert self.side is not None
        clocks, step = self.side.clocks, self.side.interior
        return (round(clocks, 3), round(step.always_per_score, 3), self.candidate.name)


@dataclass(frozen=True)
class Ranking:
    """The candidates that are clean, best first: the first of them at its heaviest too."""

    question: Question
    ranked: tuple[Found, ...]
    dropped: tuple[Found, ...]
    planned: Candidate
    feasible: int
    """How many there were before those that the plan puts last were left out."""

    @property
    def planned_place(self) -> int | None:
        """The place of the table's row, from 0; None where it was dropped."""
        places = [i for i, found in enumerate(self.ranked) if found.candidate == self.planned]
        return places[0] if places else None

    def behind(self, place: int) -> float:
        """Clocks over those of the first, less one."""
        first, found = self.ranked[0].side, self.ranked[place].side
        assert first is not None and found is not None
        return found.clocks / first.clocks - 1


def search(question: Question, limit: int, pool: ProcessPoolExecutor) -> Ranking:
    """Compiles the `limit` most promising candidates and the table's own row, and ranks them."""
    feasible = enumerate_rows(question.case, question.arch)
    planned = planned_row(question.case, question.arch, question.plain)
    chosen = list(dict.fromkeys([*feasible[:limit], planned]))
    specs = [question.spec(candidate) for candidate in chosen]
    compiled = list(pool.map(compile_report, specs))
    found = [_found(question.case, *pair) for pair in zip(chosen, compiled, strict=True)]
    return _ranked(Ranking(question, (), (), planned, len(feasible)), found, pool)


def with_l2_at_ease(ranking: Ranking, pool: ProcessPoolExecutor) -> Ranking:
    """The same candidates if a kernel waited for what it asks of L2 beyond `L2_AT_EASE`."""
    case = ranking.question.case
    found = [_at_ease(case, each) for each in (*ranking.ranked, *ranking.dropped)]
    return _ranked(ranking, found, pool)


def _ranked(ranking: Ranking, found: Sequence[Found], pool: ProcessPoolExecutor) -> Ranking:
    """The ranking of these candidates instead."""
    ranked = sorted((each for each in found if not each.faults), key=lambda each: each.rank)
    dropped = [each for each in found if each.faults]
    while ranked:
        results = pool.map(compile_report, ranking.question.heaviest(ranked[0].candidate))
        faults = dict.fromkeys(fault for result in results for fault in faults_of(result))
        if not faults:
            break
        texts = tuple(f"with everything: {fault}" for fault in faults)
        dropped.append(replace(ranked.pop(0), faults=texts))
    return replace(ranking, ranked=tuple(ranked), dropped=tuple(dropped))


def compile_report(spec: KernelSpec) -> KernelReport | str:
    """What the compiler made of a kernel, or its refusal; runs in a process of the pool."""
    from hopperflash.runtime.compile import compile_kernel

    try:
        return report(spec, compile_kernel(spec).artifacts.CUBIN)
    except CompileError as refused:
        return refused.reasons[0].splitlines()[0]


def faults_of(compiled: KernelReport | str) -> tuple[str, ...]:
    """Why a kernel is of no use."""
    if isinstance(compiled, str):
        return (f"does not compile: {compiled}",)
    faults = [f"{compiled.spill_bytes} B spilled"] if compiled.spill_bytes else []
    faults += [f"{compiled.stack_bytes} B of stack"] if compiled.stack_bytes else []
    faults += ["wgmma serialised"] if any(step.serialised for step in compiled.steps) else []
    return tuple(faults)


def _found(case: Case, candidate: Candidate, compiled: KernelReport | str) -> Found:
    faults = faults_of(compiled)
    if isinstance(compiled, str):
        return Found(candidate, None, faults=faults)
    config = candidate.config
    side = Side(config.tile_m, config.tile_n, compiled.steps, compiled.spill_bytes,
                compiled.stack_bytes, clocks=0.0)  # fmt: skip
    side = replace(side, clocks=clocks_per_thousand(case, side))
    return Found(candidate, side, compiled.registers, compiled.shared_bytes, faults)


def _at_ease(case: Case, found: Found) -> Found:
    if found.side is None:
        return found
    rate = L2_AT_EASE.get(type(found.candidate.config), HOPPER.l2_bytes)
    steps = [
        replace(step, units=replace(step.units, l2=step.units.l2 * HOPPER.l2_bytes / rate))
        for step in found.side.steps
    ]
    side = replace(found.side, steps=tuple(steps))
    return replace(found, side=replace(side, clocks=clocks_per_thousand(case, side)))


COLUMNS = ("", "tile", "clocks for 1000 pairs", "behind", "bound by", "interior", "boundary",
           "registers", "KiB")  # fmt: skip


def rows(ranking: Ranking) -> Iterator[tuple[str, ...]]:
    """The cells of a table of a ranking; the table's own row has a star."""
    for place, found in enumerate(ranking.ranked):
        side = found.side
        assert side is not None
        yield (
            f"{place + 1}{'*' if place == ranking.planned_place else ''}",
            found.candidate.name,
            f"{side.clocks:.1f}",
            f"{100 * ranking.behind(place):+.1f} %",
            side.interior.units.bound.unit,
            f"{side.interior.always_per_score:.2f}",
            f"{side.boundary.always_per_score:.2f}" if side.boundary.masked else "-",
            str(found.registers),
            f"{found.shared_bytes / 1024:.0f}",
        )


def headline(ranking: Ranking) -> str:
    """What was searched."""
    case, tried = ranking.question.case, len(ranking.ranked) + len(ranking.dropped)
    plain = ", plain problems only" if ranking.question.plain else ""
    window = f" {WINDOW_LEFT}" if case.mask is MaskKind.WINDOW else ""
    return (
        f"{case.direction} {case.name}{window} on {ranking.question.arch.name}{plain}, one head of"
        f" {SEQLEN}: {ranking.feasible} feasible, {tried} compiled, {len(ranking.dropped)} dropped"
    )


def lines(ranking: Ranking, markdown: bool) -> Iterator[str]:
    """A ranking as text or Markdown."""
    table = [COLUMNS, *rows(ranking)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    yield headline(ranking) + ("\n" if markdown else "")
    for number, row in enumerate(table):
        if markdown:
            yield "| " + " | ".join(row) + " |"
            if number == 0:
                yield "| --- " * len(row) + "|"
        else:
            yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
    if markdown and ranking.dropped:
        yield ""
    for found in ranking.dropped:
        mark = "*" if found.candidate == ranking.planned else ""
        yield f"{'- ' if markdown else ''}dropped{mark} {found.candidate.name}: " + ", ".join(
            found.faults
        )


def as_json(ranking: Ranking) -> dict[str, Any]:
    """A ranking as one record."""

    def record(found: Found) -> dict[str, Any]:
        row = {name: getattr(value, "value", value) for name, value in found.candidate.row}
        side = found.side
        measured: dict[str, Any] = {}
        if side is not None:
            measured = {
                "clocks": side.clocks,
                "bound": side.interior.units.bound.unit,
                "interior": side.interior.always_per_score,
                "boundary": side.boundary.always_per_score if side.boundary.masked else None,
                "registers": found.registers,
                "shared_bytes": found.shared_bytes,
            }
        return {"row": row, **measured, "faults": found.faults}

    return {
        "searched": headline(ranking),
        "ranked": [record(found) for found in ranking.ranked],
        "dropped": [record(found) for found in ranking.dropped],
        "planned_place": ranking.planned_place,
    }


def processes(jobs: int | None) -> ProcessPoolExecutor:
    """A pool whose processes compile; not forked, for the compiler's threads would not survive."""
    count = jobs or len(os.sched_getaffinity(0))
    return ProcessPoolExecutor(count, mp_context=get_context("spawn"))


def main(arguments: Sequence[str] | None = None) -> None:
    from profiling.check_tiles import check

    parser = argparse.ArgumentParser(description=__doc__.split(":")[0])
    parser.add_argument("--head-dim", type=int, choices=HEAD_DIMS)
    parser.add_argument("--head-dim-v", type=int, choices=HEAD_DIMS)
    parser.add_argument("--mask", choices=[kind.value for kind in MaskKind], default="causal")
    parser.add_argument("--direction", choices=("forward", "backward"))
    parser.add_argument("--arch", default="sm_90a")
    parser.add_argument("--plain", action="store_true", help="a row for plain problems only")
    parser.add_argument("--limit", type=int, default=LIMIT, help="rows to compile")
    parser.add_argument("--jobs", type=int, help="processes; by default as many as CPUs")
    parser.add_argument("--check", action="store_true", help="all rows of the table")
    parser.add_argument("--write", action="store_true", help="dates into plan/tiles_sm90.py")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true")
    form.add_argument("--markdown", action="store_true")
    options = parser.parse_args(arguments)
    arch = arch_of(options.arch)
    if options.write and not (options.check and "wgmma" in arch.features):
        parser.error("--write needs --check, and --arch sm_90a, whose rows have dates")
    with processes(options.jobs) as pool:
        if options.check:
            check(options, pool)
            return
        head_dim = options.head_dim or 128
        case = Case(options.direction or "forward", head_dim, options.head_dim_v or head_dim,
                    MaskKind(options.mask))  # fmt: skip
        question = Question(case, arch, options.plain)
        ranking = search(question, options.limit, pool)
    if options.json:
        print(json.dumps(as_json(ranking), indent=2))
    else:
        print("\n".join(lines(ranking, options.markdown)))


if __name__ == "__main__":
    main()
