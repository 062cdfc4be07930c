"""What `hopperflash profile` prints."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console

from hopperflash.cli.io import in_units
from hopperflash.cli.output import as_json, table
from hopperflash.plan.units import LABELS
from hopperflash.profiler.comparison import Comparison
from hopperflash.profiler.nsys import PassTime


def show_comparisons(found: Sequence[Comparison], console: Console) -> None:
    """A block for each kernel: facts, bytes beside the model's, units beside the plan's."""
    for number, kernel in enumerate(found):
        if number:
            console.print()
        for line in _facts(kernel):
            console.print(line, markup=False)
        moved = table("", "counted", "model", "ratio")
        for row in kernel.bytes:
            if row.counted is not None:
                ratio = "" if row.ratio is None else f"{row.ratio:.3f}"
                moved.add_row(row.name, _size(row.counted), _size(row.model), ratio)
        console.print(moved)
        if any(unit.busy is not None for unit in kernel.units):
            units = table("", "busy", "model, of the bound")
            for unit in kernel.units:
                units.add_row(LABELS[unit.name], _percent(unit.busy), _percent(unit.model))
            console.print(units)
        if kernel.stalls:
            waits = ", ".join(f"{why} {warps:.2f}" for why, warps in kernel.stalls)
            console.print(f"warps waiting at each issue: {waits}", markup=False)


def as_data(found: Sequence[Comparison]) -> list[dict[str, Any]]:
    """For programs; times in ns."""
    plain: list[dict[str, Any]] = json.loads(as_json(found))
    for kernel, data in zip(found, plain, strict=True):
        for row, cells in zip(kernel.bytes, data["bytes"], strict=True):
            cells["ratio"] = row.ratio
    return plain


def show_passes(found: Sequence[PassTime], console: Console) -> None:
    """Each pass, then its kernels, in microseconds: medians."""
    passes = table("pass", "calls", "host us", "GPU us", "busy us", "gaps us", "longest gap us")
    for one in found:
        times = (one.host, one.span, one.busy, one.gaps, one.longest_gap)
        passes.add_row(one.name, str(one.calls), *(f"{1e-3 * time:.1f}" for time in times))
    console.print(passes)
    for one in found:
        console.print(f"\n{one.name}, a call:", markup=False)
        for kernel in one.kernels:
            launches = f"{kernel.launches:g} x {1e-3 * kernel.nanoseconds:.1f} us"
            console.print(f"{launches:>16}  {kernel.name}", markup=False)


def _facts(kernel: Comparison) -> Iterator[str]:
    yield kernel.name
    ctas, threads = ("x".join(map(str, dims)) or "?" for dims in (kernel.grid, kernel.block))
    times = f", median of {kernel.launches} launches" if kernel.launches > 1 else ""
    duration = "" if kernel.nanoseconds is None else f"{1e-3 * kernel.nanoseconds:.1f} us, "
    yield f"  {duration}grid {ctas} of {threads} threads{times}"
    facts = ", ".join(f"{label} {value:,.0f}" for label, value in kernel.facts.items())
    if facts:
        yield f"  {facts}"


def _size(size: float | None) -> str:
    return "" if size is None else in_units(round(size))


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1f} %"
