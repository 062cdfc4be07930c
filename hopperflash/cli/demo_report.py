"""A demonstration in tables for people, and as data for programs."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from hopperflash import plan
from hopperflash.analysis.traffic import Traffic
from hopperflash.cli.demonstration import Demonstration, Part
from hopperflash.cli.output import table

TRAFFIC_FORMULAS = {
    "forward": "materialised: Q + K + V + O + 2 S + 2 P, S and P of all pairs in the input dtype",
    "backward": "materialised: 2 (Q + K + V) + 2 dO + 2 P + 2 dP + 3 dS, all in the input dtype",
}

HAZARDS_SHOWN = 8


def show(shown: Demonstration, console: Console) -> None:
    """Plan, errors beside the tolerance, traffic, work, hazards and time."""
    for part in shown.parts:
        console.print(plan.explain(part.plan), markup=False)
        console.print()
    console.print(_errors(shown))
    for part in shown.parts:
        if part.traffic is not None:
            console.print(_traffic(part.plan.direction, part.traffic, part.materialized))
            console.print(TRAFFIC_FORMULAS[part.plan.direction], markup=False)
            console.print()
    for label, line in _facts(shown):
        console.print(f"{label:<11}{line}", markup=False)
    if not shown.failures:
        clean = ", no hazards" if shown.run is not None else ""
        *names, last = shown.deviations
        results = f"{', '.join(names)} and {last}"
        console.print(f"[green]correct[/]    {results} are inside the tolerance{clean}")


def as_data(shown: Demonstration) -> dict[str, Any]:
    """The same for programs; sizes in bytes, times in seconds."""
    run = shown.run
    return {
        "ok": not shown.failures,
        "failures": shown.failures,
        "device": shown.device,
        "deviations": shown.deviations,
        **_part_data(shown.forward),
        "backward": None if shown.backward is None else _part_data(shown.backward),
        "hazards": None if run is None else run.hazards,
        "launches": None if run is None else run.launches,
        "seconds": shown.seconds,
    }


def _part_data(part: Part) -> dict[str, Any]:
    """What was measured of one direction."""
    return {
        "plan": part.plan,
        "tiles": part.tiles,
        "traffic": part.traffic,
        "materialized_traffic": part.materialized,
        "useful_flops": part.useful_flops,
        "mma_flops": part.executed_flops,
        "counters": part.counters,
    }


def _errors(shown: Demonstration) -> Table:
    found = table("against fp64", "max error", "allowed", "rms error", "allowed", "")
    for name, deviation in shown.deviations.items():
        found.add_row(
            name,
            f"{deviation.max_error:.2e}",
            f"{deviation.max_bound:.2e}",
            f"{deviation.rms_error:.2e}",
            f"{deviation.rms_bound:.2e}",
            "inside" if deviation.ok else "OUTSIDE",
        )
    return found


def _traffic(direction: str, counted: Traffic, materialized: Traffic) -> Table:
    found = table(f"{direction} bytes", "here", "materialised", "ratio")
    for name, here, there in (
        ("loaded", counted.loaded, materialized.loaded),
        ("stored", counted.stored, materialized.stored),
        ("total", counted.total, materialized.total),
    ):
        found.add_row(name, f"{here:,}", f"{there:,}", f"{here / there:.2f}")
    return found


def _facts(shown: Demonstration) -> list[tuple[str, str]]:
    run = shown.run
    facts = [("executed", f"on the {shown.device}")]
    for part in shown.parts:
        facts += _work(part)
    if run is not None:
        facts.append(("hazards", str(len(run.hazards)) if run.hazards else "none"))
        facts += [("", hazard) for hazard in run.hazards[:HAZARDS_SHOWN]]
    times = ", ".join(f"{part} {seconds:.3g} s" for part, seconds in shown.seconds.items())
    return [*facts, ("time", times)]


def _work(part: Part) -> list[tuple[str, str]]:
    """Tiles and FLOPs of one direction; only the emulator knows what was executed."""
    tiles, executed, useful = part.tiles, part.executed_flops, part.useful_flops
    label = part.plan.direction
    if executed is None:
        return [(label, f"{tiles.planned} tiles planned, {tiles.skipped} skipped")]
    agreement = "as planned" if tiles.agree else f"but {tiles.planned} planned"
    visited = f"{tiles.executed:g} visited (MMA FLOPs / FLOPs per tile), {agreement}"
    share = f"{useful:,} useful ({100 * useful / executed:.1f} %)" if executed else "none useful"
    return [
        (label, f"tiles: {visited}; {tiles.skipped} skipped"),
        ("", f"FLOPs: {executed:,} by MMA, {share}"),
    ]
