"""A demonstration in tables for people, and as data for programs."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from hopperflash import plan
from hopperflash.analysis.traffic import Traffic
from hopperflash.cli.demonstration import Demonstration, mma_flops

TRAFFIC_FORMULA = "materialised: Q + K + V + O + 2 S + 2 P, S and P of all pairs in the input dtype"

HAZARDS_SHOWN = 8


def show(shown: Demonstration, console: Console) -> None:
    """Plan, errors beside the tolerance, traffic, work, hazards and time."""
    console.print(plan.explain(shown.plan), markup=False)
    console.print()
    console.print(_errors(shown))
    if shown.traffic is not None:
        console.print(_traffic(shown.traffic, shown.materialized))
        console.print(TRAFFIC_FORMULA, markup=False)
        console.print()
    for label, line in _facts(shown):
        console.print(f"{label:<11}{line}", markup=False)
    if not shown.failures:
        clean = ", no hazards" if shown.run is not None else ""
        console.print(f"[green]correct[/]    O and LSE are inside the tolerance{clean}")


def as_data(shown: Demonstration) -> dict[str, Any]:
    """The same for programs; sizes in bytes, times in seconds."""
    run = shown.run
    return {
        "ok": not shown.failures,
        "failures": shown.failures,
        "plan": shown.plan,
        "device": shown.device,
        "deviations": shown.deviations,
        "tiles": shown.tiles,
        "traffic": shown.traffic,
        "materialized_traffic": shown.materialized,
        "useful_flops": shown.plan.problem.useful_flops("forward"),
        "mma_flops": None if run is None else mma_flops(run),
        "hazards": None if run is None else run.hazards,
        "launches": None if run is None else run.launches,
        "counters": None if run is None else run.counters,
        "seconds": shown.seconds,
    }


def _errors(shown: Demonstration) -> Table:
    table = _table("against fp64", "max error", "allowed", "rms error", "allowed", "")
    for name, deviation in shown.deviations.items():
        table.add_row(
            name,
            f"{deviation.max_error:.2e}",
            f"{deviation.max_bound:.2e}",
            f"{deviation.rms_error:.2e}",
            f"{deviation.rms_bound:.2e}",
            "inside" if deviation.ok else "OUTSIDE",
        )
    return table


def _traffic(counted: Traffic, materialized: Traffic) -> Table:
    table = _table("bytes", "this kernel", "materialised", "ratio")
    for name, here, there in (
        ("loaded", counted.loaded, materialized.loaded),
        ("stored", counted.stored, materialized.stored),
        ("total", counted.total, materialized.total),
    ):
        table.add_row(name, f"{here:,}", f"{there:,}", f"{here / there:.2f}")
    return table


def _table(label: str, *columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column(label)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _facts(shown: Demonstration) -> list[tuple[str, str]]:
    problem, tiles, run = shown.plan.problem, shown.tiles, shown.run
    useful = problem.useful_flops("forward")
    facts = [("executed", f"on the {shown.device}")]
    if run is None:
        facts.append(("tiles", f"{tiles.planned} planned, {tiles.skipped} skipped"))
    else:
        agreement = "as planned" if tiles.agree else f"but {tiles.planned} planned"
        executed = mma_flops(run)
        facts += [
            (
                "tiles",
                f"{tiles.executed:g} visited (MMA FLOPs / FLOPs per tile), {agreement};"
                f" {tiles.skipped} skipped",
            ),
            (
                "FLOPs",
                f"{executed:,} by MMA, {useful:,} useful ({100 * useful / executed:.1f} %)",
            ),
            ("hazards", str(len(run.hazards)) if run.hazards else "none"),
        ]
        facts += [("", hazard) for hazard in run.hazards[:HAZARDS_SHOWN]]
    times = ", ".join(f"{part} {seconds:.3g} s" for part, seconds in shown.seconds.items())
    return [*facts, ("time", times)]
