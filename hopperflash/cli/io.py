"""`hopperflash io`: bytes through global memory, materialised against tiled, by sequence length."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, get_args

import typer
from rich.console import Console

from hopperflash import plan
from hopperflash.analysis.tiled_traffic import L2, tiled_traffic
from hopperflash.analysis.traffic import Traffic, materialized_traffic
from hopperflash.cli.explain import ExplainOptions, plan_of
from hopperflash.cli.options import ProblemOptions, command, flag
from hopperflash.cli.output import print_json, stdout, table
from hopperflash.errors import InvalidArgument
from hopperflash.problem import AttnProblem, Direction

SHORTEST = 512
MIB = 1 << 20


@dataclass(frozen=True)
class IoOptions(ProblemOptions):
    """What `hopperflash io` takes; lengths are powers of two up to `seqlen`."""

    head_dim_v: Annotated[int | None, flag("Head dim of V.", show_default="head_dim")] = None
    arch: Annotated[str, flag("Target, such as sm_90a or sm_80.")] = "sm_90a"
    l2_mib: Annotated[
        int | None, typer.Option(help="MiB of L2 cache.", min=0, show_default="the arch's")
    ] = None
    sms: Annotated[int | None, typer.Option(help="SMs.", min=1, show_default="the arch's")] = None
    json: Annotated[bool, flag("Print one JSON document.", "--json")] = False


@dataclass(frozen=True)
class Io:
    """Bytes and FLOPs of one direction of one problem.

    `scores` is the size of one matrix of all scores in the input dtype; `materialized` writes and
    reads such matrices; the tiled kernels ask for `asked` bytes, of which `behind_l2` reach memory
    behind the L2 cache, and `once` would if it held everything.
    """

    seqlen_q: int
    seqlen_k: int
    direction: Direction
    scores: int
    useful_flops: int
    materialized: Traffic
    asked: Traffic
    behind_l2: Traffic
    once: Traffic


@dataclass(frozen=True)
class Report:
    """What is printed."""

    arch: str
    l2: L2
    problem: AttnProblem
    rows: tuple[Io, ...]


@command(IoOptions)
def io(options: IoOptions) -> None:
    """Print the bytes that attention moves through global memory, materialised and tiled.

    Every length has its plan; bytes of the tiled kernels are those of its tiles.
    """
    report = report_of(options)
    if options.json:
        print_json(report)
    else:
        show(report, stdout())


def report_of(options: IoOptions) -> Report:
    """A row for each length and direction."""
    if options.seqlens is not None:
        raise InvalidArgument("--seqlens: the lengths of packed sequences are values of tensors")
    longest = options.seqlen or 16 * SHORTEST
    lengths = [n for n in _doubled(SHORTEST, longest) if n < longest] + [longest]
    l2 = _l2(options)
    rows = []
    for length in lengths:
        for direction in get_args(Direction):
            planned = _plan(options, length, direction)
            rows.append(io_of(planned, l2))
    return Report(options.arch, l2, planned.problem, tuple(rows))


def io_of(planned: plan.LaunchPlan, l2: L2) -> Io:
    """The bytes of one plan."""
    p, moved = planned.problem, tiled_traffic(planned)
    return Io(
        seqlen_q=p.seqlen_q,
        seqlen_k=p.seqlen_k,
        direction=planned.direction,
        scores=p.batch * p.heads_q * p.seqlen_q * p.seqlen_k * p.dtype.itemsize,
        useful_flops=p.useful_flops(planned.direction),
        materialized=materialized_traffic(p, planned.direction),
        asked=moved.asked,
        behind_l2=moved.behind(l2),
        once=moved.once,
    )


def show(report: Report, console: Console) -> None:
    """A table for each direction; ratio and FLOPs are those of what reaches memory."""
    p, l2 = report.problem, report.l2
    console.print(
        f"batch {p.batch}, {p.heads_q} query heads over {p.heads_k}, head_dim {p.head_dim} and"
        f" {p.head_dim_v}, {p.dtype.value}, {p.mask}; {report.arch}, {l2.sms} SMs,"
        f" {l2.bytes / MIB:.0f} MiB of L2"
    )
    for direction in get_args(Direction):
        found = table(
            direction, "a score matrix", "materialised", "tiled", "behind L2", "ratio", "FLOP/byte"
        )
        for row in report.rows:
            if row.direction == direction:
                found.add_row(*_cells(row))
        console.print()
        console.print(found)


def _cells(row: Io) -> Iterator[str]:
    keys = "" if row.seqlen_k == row.seqlen_q else f" x {row.seqlen_k:,}"
    yield f"{row.seqlen_q:,}{keys}"
    for size in (row.scores, row.materialized.total, row.asked.total, row.behind_l2.total):
        yield in_units(size)
    yield f"{row.materialized.total / row.behind_l2.total:.1f}"
    yield f"{row.useful_flops / row.behind_l2.total:,.0f}"


def in_units(size: int) -> str:
    """Bytes in decimal units, four digits."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.4g} {unit}"
    return f"{size} B"


def _plan(options: IoOptions, length: int, direction: Direction) -> plan.LaunchPlan:
    keys = options.seqlen_k
    if keys is not None and options.seqlen is not None:
        keys = max(1, keys * length // options.seqlen)
    sized = {name: getattr(options, name) for name in ProblemOptions.__dataclass_fields__}
    sized |= {"seqlen": length, "seqlen_k": keys}
    planned = plan_of(
        ExplainOptions(
            **sized, head_dim_v=options.head_dim_v, arch=options.arch, direction=direction
        )
    )
    if not planned.calls:
        raise InvalidArgument(f"arch {options.arch!r} runs no kernels: give a GPU target")
    return planned


def _l2(options: IoOptions) -> L2:
    """That of the options, or of the arch's usual device."""
    usual, mib = L2.of(plan.arch_of(options.arch)), options.l2_mib
    return L2(usual.bytes if mib is None else mib * MIB, options.sms or usual.sms)


def _doubled(first: int, last: int) -> list[int]:
    lengths = [first]
    while 2 * lengths[-1] <= last:
        lengths.append(2 * lengths[-1])
    return lengths
