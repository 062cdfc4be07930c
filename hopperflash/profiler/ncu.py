"""Nsight Compute: the command that profiles our kernels, and what its reports say of them."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from hopperflash import env
from hopperflash.errors import InvalidArgument
from hopperflash.profiler import metrics, tools
from hopperflash.profiler.metrics import Quantity
from hopperflash.profiler.tools import Command

TOOL = "ncu"
SUFFIX = ".ncu-rep"
# The compiler gives entry functions the class's name and a number.
OURS = "regex:^hopperflash_"
_UNITS = {
    "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9,
    "usecond": 1e3, "msecond": 1e6, "second": 1e9, "us": 1e3, "ms": 1e6, "s": 1e9,
}  # fmt: skip
"""To bytes and nanoseconds, which are what other units of the metrics in use already are."""


@dataclass(frozen=True)
class Settings:
    """How ncu profiles; docs/profiling.md says what each costs and distorts."""

    arch: str  # the compile target
    report: Path
    all_sections: bool = False
    lineinfo: bool = False
    cache_control: str = "all"
    clock_control: str = "base"
    kernels: str | None = OURS  # which of the target's; None for all
    quantities: tuple[Quantity, ...] | None = None  # these alone; None for all there are


@dataclass(frozen=True)
class KernelProfile:
    """A kernel's metrics by name, of times in ns and of sizes in bytes: medians over launches."""

    name: str
    launches: int
    capability: tuple[int, int]
    grid: tuple[int, ...]
    block: tuple[int, ...]
    metrics: Mapping[str, float]


def command(target: Sequence[str], settings: Settings, known: frozenset[str] | None) -> Command:
    """The command that profiles kernels of the target, by default this package's.

    `known` are the metrics of the chip where they were listed; None to ask for all that are wanted.
    """
    s = settings
    sections = [
        *(metrics.SECTIONS if s.quantities is None else ()),
        *([metrics.LINE_SECTION] if s.lineinfo else []),
    ]
    words = [tools.find(TOOL) or TOOL, "--profile-from-start", "off", "--nvtx"]
    words += ["--kernel-name", s.kernels] if s.kernels is not None else []
    words += ["--set", "full"] if s.all_sections else []
    words += [word for section in sections for word in ("--section", section)]
    words += ["--metrics", ",".join(metrics.asked(s.arch, known, s.quantities))]
    words += ["--import-source", "yes"] if s.lineinfo else []
    words += ["--cache-control", s.cache_control, "--clock-control", s.clock_control]
    words += ["--export", str(s.report), "--force-overwrite"]
    return Command((*words, *target), {env.LINE_INFO: "1"} if s.lineinfo else {})


def known_metrics(target: str) -> frozenset[str] | None:
    """What the installed ncu can count on a compile target; None where it cannot say."""
    tool = tools.find(TOOL)
    query = None if tool is None else metrics.query(tool, target)
    if query is None:
        return None
    return metrics.base_names(tools.output(query)) or None


def read(path: Path) -> tuple[KernelProfile, ...]:
    """The kernels of this package in a report of ncu, or in what `--page raw --csv` prints of one.

    Raises `InvalidArgument` for a file that is neither, or holds no such kernel.
    """
    found = launches_of(path)
    ours = [profile for profile in found if profile.name.startswith(OURS.rpartition("^")[2])]
    if not ours:
        others = ", ".join(sorted({profile.name for profile in found})) or "none"
        raise InvalidArgument(f"{path} holds no kernel of this package: found {others}")
    return merged(ours)


def launches_of(path: Path) -> list[KernelProfile]:
    """Every launch in such a file, of whatever kernel."""
    if not path.is_file():
        raise InvalidArgument(f"cannot read {path}: no such file")
    return _of_report(path) if path.suffix == SUFFIX else parse(path.read_text(errors="replace"))


def parse(text: str) -> list[KernelProfile]:
    """Launches in what ncu prints with `--csv`: metrics in columns (the raw page), or in rows."""
    lines = text.splitlines()
    begin = next((n for n, line in enumerate(lines) if line.startswith('"ID",')), None)
    if begin is None:
        raise InvalidArgument(
            "this is no CSV of ncu:",
            [
                'no line begins with "ID": write it by `ncu --import FILE --page raw --csv`',
                *tools.advice_on(text),
            ],
        )
    header, *rows = csv.reader(io.StringIO("\n".join(lines[begin:])))
    records = [dict(zip(header, row, strict=False)) for row in rows if len(row) > 1]
    if "Metric Name" in header:
        return list(_by_rows(records))
    units, *launches = records
    return [_profile(launch, _values(launch, units)) for launch in launches]


def _by_rows(records: Iterable[Mapping[str, str]]) -> Iterator[KernelProfile]:
    launches: dict[str, list[Mapping[str, str]]] = {}
    for record in records:
        launches.setdefault(record["ID"], []).append(record)
    for rows in launches.values():
        texts = {row["Metric Name"]: row.get("Metric Value") or "" for row in rows}
        units = {row["Metric Name"]: row["Metric Unit"] for row in rows}
        yield _profile(rows[0], _values(texts, units))


def _profile(facts: Mapping[str, str], values: Mapping[str, float]) -> KernelProfile:
    major, _, minor = facts.get("CC", "").partition(".")
    return KernelProfile(
        name=facts["Kernel Name"].partition("(")[0],
        launches=1,
        capability=(int(major or 0), int(minor or 0)),
        grid=_numbers(facts.get("Grid Size", "")),
        block=_numbers(facts.get("Block Size", "")),
        metrics=values,
    )


def _values(texts: Mapping[str, str], units: Mapping[str, str]) -> dict[str, float]:
    found = {}
    for name, text in texts.items():
        value = _number(text)
        if value is not None:
            found[name] = value * _scale(units.get(name, ""))
    return found


def _number(text: str) -> float | None:
    """Of "1,234.5"; None for what is no number."""
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


def _scale(unit: str) -> float:
    return _UNITS.get(unit.partition("/")[0], 1.0)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)))


def _of_report(path: Path) -> list[KernelProfile]:
    """By ncu where it is installed, which reads all that it writes; else by `ncu-report`."""
    tool = tools.find(TOOL)
    if tool is not None:
        form = ("--page", "raw", "--csv", "--print-units", "base")
        return parse(tools.output((tool, "--import", str(path), *form)))
    try:
        import ncu_report
    except ImportError:
        raise InvalidArgument(
            f"cannot read {path}: it takes one of",
            [
                tools.absent(TOOL),
                "the package ncu-report, at least as new: `pip install 'hopperflash[profiling]'`",
                "what `ncu --import FILE --page raw --csv` prints on another machine",
            ],
        ) from None
    report = ncu_report.load_report(str(path))
    return [_of_action(action) for launches in report for action in launches]


def _of_action(action: Any) -> KernelProfile:
    values = {}
    for name in action.metric_names():
        metric = action.metric_by_name(name)
        if isinstance(metric.value(), (int, float)):
            values[name] = float(metric.value()) * _scale(metric.unit())

    def dims(what: str) -> tuple[int, ...]:
        return tuple(int(values.get(f"launch__{what}_dim_{axis}", 0)) for axis in "xyz")

    capability = [
        int(values.get(f"device__attribute_compute_capability_{part}", 0))
        for part in ("major", "minor")
    ]
    return KernelProfile(
        action.name(), 1, (capability[0], capability[1]), dims("grid"), dims("block"), values
    )


def merged(profiles: Iterable[KernelProfile]) -> tuple[KernelProfile, ...]:
    """One profile for each kernel, in the order of their first launches."""
    groups: dict[str, list[KernelProfile]] = {}
    for profile in profiles:
        groups.setdefault(profile.name, []).append(profile)
    return tuple(_median(group) for group in groups.values())


def _median(launches: Sequence[KernelProfile]) -> KernelProfile:
    names = launches[0].metrics
    values = {
        name: median(one.metrics[name] for one in launches if name in one.metrics) for name in names
    }
    return replace(launches[0], launches=len(launches), metrics=values)
