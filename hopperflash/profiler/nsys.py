"""Nsight Systems: the command that traces our passes, and launches, times and gaps of each pass."""

from __future__ import annotations

import csv
import io
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from hopperflash.errors import InvalidArgument
from hopperflash.profiler import RANGE, tools
from hopperflash.profiler.tools import Command

TOOL = "nsys"
SUFFIX = ".nsys-rep"
# What runs on the GPU, and NVTX ranges as seen from there, as `nsys stats` names these reports.
OPERATIONS = "cuda_gpu_trace"
RANGES = "nvtx_gpu_proj_trace"


@dataclass(frozen=True)
class Operation:
    """What ran on the GPU, in ns; `kernel` is False for copies and fills."""

    name: str
    start: int
    duration: int
    kernel: bool

    @property
    def end(self) -> int:
        return self.start + self.duration


@dataclass(frozen=True)
class Range:
    """An NVTX range: when its first operation began on the GPU and how long until its last ended,
    and for how long the host was inside, in ns."""

    name: str
    start: int
    duration: int
    host: int


@dataclass(frozen=True)
class KernelTime:
    """A kernel in a pass: its launches in one, and the median of their ns."""

    name: str
    launches: float
    nanoseconds: float


@dataclass(frozen=True)
class PassTime:
    """Medians over the calls of a pass, in ns: the host's time in it; on the GPU the time from
    first to last, in which anything ran, in which nothing did, and the longest such gap."""

    name: str
    calls: int
    host: float
    span: float
    busy: float
    gaps: float
    longest_gap: float
    kernels: tuple[KernelTime, ...]


def command(target: Sequence[str], report: Path) -> Command:
    """The command that traces CUDA and NVTX in the target's passes; it needs no permission."""
    return Command((
        tools.find(TOOL) or TOOL, "profile", "--trace=cuda,nvtx", "--sample=none",
        "--cpuctxsw=none", "--capture-range=cudaProfilerApi", "--capture-range-end=stop",
        "--force-overwrite=true", f"--output={report}", *target,
    ))  # fmt: skip


def statistics_command(report: Path) -> tuple[str, ...]:
    """The command that writes both tables beside a report."""
    wanted = [word for name in (OPERATIONS, RANGES) for word in ("--report", name)]
    return (
        tools.find(TOOL) or TOOL, "stats", *wanted, "--format", "csv", "--force-export=true",
        "--force-overwrite=true", "--output", str(report.with_suffix("")), str(report),
    )  # fmt: skip


def tables(report: Path) -> tuple[Path, Path]:
    """Where `nsys stats` puts the operations and the ranges of a report."""
    stem = report.with_suffix("")
    operations, ranges = (
        stem.with_name(f"{stem.name}_{name}.csv") for name in (OPERATIONS, RANGES)
    )
    return operations, ranges


def read(report: Path) -> tuple[PassTime, ...]:
    """The passes of a report; its tables are written beside it unless they are there and newer.

    Raises `InvalidArgument` where there is neither nsys nor its tables, or no pass in them.
    """
    if not _written(report):
        if tools.find(TOOL) is None:
            names = " and ".join(path.name for path in tables(report))
            raise InvalidArgument(
                f"cannot read {report}: it takes one of",
                [tools.absent(TOOL), f"{names} beside it, from `nsys stats --format csv`"],
            )
        if not report.is_file():
            raise InvalidArgument(f"cannot read {report}: no such file")
        tools.output(statistics_command(report))
    missing = [path.name for path in tables(report) if not path.is_file()]
    if missing:
        raise InvalidArgument(f"nsys found nothing in {report} for {', '.join(missing)}")
    operations, ranges = (path.read_text(errors="replace") for path in tables(report))
    found = passes(parse_operations(operations), parse_ranges(ranges))
    if not found:
        raise InvalidArgument(f"{report} holds no pass: no NVTX range is named {RANGE!r} something")
    return found


def _written(report: Path) -> bool:
    since = report.stat().st_mtime if report.is_file() else 0.0
    return all(path.is_file() and path.stat().st_mtime >= since for path in tables(report))


def parse_operations(text: str) -> list[Operation]:
    """The table `cuda_gpu_trace`; only kernels have a grid."""
    return sorted(
        (
            Operation(
                row["Name"], int(row["Start (ns)"]), int(row["Duration (ns)"]), bool(row["GrdX"])
            )
            for row in _rows(text, "Start (ns)")
        ),
        key=lambda operation: operation.start,
    )


def parse_ranges(text: str) -> list[Range]:
    """Our ranges in the table `nvtx_gpu_proj_trace`, which puts a domain and ":" before a name;
    without those in which nothing ran on the GPU."""
    found = []
    for row in _rows(text, "Name"):
        name = row["Name"].rpartition(":")[2]
        if name.startswith(RANGE) and row["Projected Start (ns)"]:
            times = ("Projected Start (ns)", "Projected Duration (ns)", "Orig Duration (ns)")
            start, duration, host = (int(row[column]) for column in times)
            found.append(Range(name.removeprefix(RANGE), start, duration, host))
    return found


def _rows(text: str, first: str) -> Iterator[Mapping[str, str]]:
    """Records below the line that begins with column `first`; notices may stand above it."""
    lines = text.splitlines()
    begin = next((n for n, line in enumerate(lines) if line.startswith(f"{first},")), len(lines))
    yield from csv.DictReader(io.StringIO("\n".join(lines[begin:])))


def passes(operations: Sequence[Operation], ranges: Sequence[Range]) -> tuple[PassTime, ...]:
    """The ranges by name, each with what ran on the GPU inside."""
    groups: dict[str, list[Range]] = defaultdict(list)
    for found in ranges:
        groups[found.name].append(found)
    return tuple(_pass(name, group, operations) for name, group in groups.items())


def _pass(name: str, calls: Sequence[Range], operations: Sequence[Operation]) -> PassTime:
    inside = [
        [one for one in operations if call.start <= one.start < call.start + call.duration]
        for call in calls
    ]
    gaps = [list(_gaps(call)) for call in inside]
    idle = [sum(call) for call in gaps]
    times: dict[str, list[int]] = defaultdict(list)
    for one in (one for call in inside for one in call if one.kernel):
        times[one.name].append(one.duration)
    return PassTime(
        name=name,
        calls=len(calls),
        host=median(call.host for call in calls),
        span=median(call.duration for call in calls),
        busy=median(call.duration - gap for call, gap in zip(calls, idle, strict=True)),
        gaps=median(idle),
        longest_gap=median(max(call, default=0) for call in gaps),
        kernels=tuple(
            KernelTime(kernel, len(found) / len(calls), median(found))
            for kernel, found in times.items()
        ),
    )


def _gaps(operations: Sequence[Operation]) -> Iterator[int]:
    """Nanoseconds between operations; a kernel may begin before the one before it has ended."""
    end = operations[0].end if operations else 0
    for one in operations[1:]:
        if one.start > end:
            yield one.start - end
        end = max(end, one.end)
