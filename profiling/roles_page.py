"""docs/roles.md: who does what in a CTA of the Hopper kernels, and when.

    python -m profiling.roles_page [FOLDER]

The kernels are compiled and executed in the emulator, without a GPU; roles are the plan's, rings
and barriers those that the executed kernel has, clocks those of the plan's model.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import torch

import hopperflash
from hopperflash.plan import LaunchPlan
from hopperflash.plan.budget import shared_memory
from hopperflash.plan.config import BackwardConfig, ForwardConfig
from hopperflash.plan.cost import TileStep, tile_step
from hopperflash.plan.explain_roles import operand_notes, roles
from hopperflash.problem import Direction
from profiling.draw_timeline import draw
from profiling.kernel_trace import Add, Meet, Store, Trace, traced
from profiling.timeline import Bar, Operands, Replay, Ring, rings

STEPS = 6
HEAD_DIM = 128
INTRO = """\
# Roles, rings and timelines

Written by `python -m profiling.roles_page`; a test holds it against the kernels. One CTA of each
Hopper kernel at head dim 128, bf16, no mask, is executed in the emulator, which records what every
warp does. Roles are what `hopperflash explain` says, rings and barriers what the kernel was seen to
use.

In the timelines a warp does its own work in its own order and waits where the kernel waits. How
long something takes is the [model's](performance.md) word: the tensor cores do one product at a
time, L2 gives an SM 32 bytes a clock, and threads take the clocks of the plan's step, spread over
the instructions seen. Nothing has a latency, so this shows what overlaps with what and what a role
waits for, not how fast a GPU is.
"""


class Output(NamedTuple):
    """What a warp puts into memory, and how."""

    warp: int
    name: str
    by: str


@dataclass(frozen=True)
class Seen:
    """A kernel's plan, and what its first CTA did."""

    direction: Direction
    config: ForwardConfig | BackwardConfig
    lines: tuple[str, ...]
    step: TileStep
    rings: tuple[Ring, ...]
    meetings: tuple[Meet, ...]
    outputs: tuple[Output, ...]
    bars: tuple[Bar, ...]

    @property
    def picture(self) -> str:
        return f"roles_{self.direction}.svg"


def see(direction: Direction) -> Seen:
    """Executes one tile of a direction's main kernel with `STEPS` steps."""
    operands = _operands(direction)
    plan = hopperflash.make_plan(*operands, arch="sm_90a", direction=direction)
    config = _main_config(plan)
    kernel = "fwd_sm90" if direction == "forward" else "bwd_sm90"
    with hopperflash.emulate("sm_90a", schedule="eager"):
        out, lse = hopperflash.flash_attn_func(*operands, return_lse=True)
    # Only where the order of sums is checked does the detector see additions.
    checked = hopperflash.emulate("sm_90a", schedule="eager", hazards="ordered")
    with checked, traced(kernel) as trace:
        if direction == "forward":
            hopperflash.flash_attn_func(*operands)
        else:
            hopperflash.flash_attn_backward(out, *operands, out, lse)
    step = tile_step(config, plan.problem.dtype.itemsize)
    names = Operands(shared_memory(config, plan.problem.dtype.itemsize), step)
    return Seen(
        direction=direction,
        config=config,
        lines=(*roles(config, plan.arch), operand_notes(config)),
        step=step,
        rings=tuple(rings(trace, names)),
        meetings=tuple(sorted(_meetings(trace), key=lambda one: one.barrier)),
        outputs=tuple(dict.fromkeys(_outputs(trace, names))),
        bars=tuple(Replay(trace, names, step).run()),
    )


def _main_config(plan: LaunchPlan) -> ForwardConfig | BackwardConfig:
    configs = [call.spec.config for call in plan.calls]
    return next(one for one in configs if isinstance(one, (ForwardConfig, BackwardConfig)))


def _operands(direction: Direction) -> tuple[torch.Tensor, ...]:
    """`STEPS` tiles that stream, and one that stays: two of queries, for CTAs that are a pair."""
    x = torch.zeros(1, 128, 1, HEAD_DIM, dtype=torch.bfloat16)
    config = _main_config(hopperflash.make_plan(x, x, x, arch="sm_90a", direction=direction))
    seqlen_q, seqlen_k = config.tile_m, config.tile_n
    if direction == "forward":
        seqlen_q, seqlen_k = 2 * seqlen_q, STEPS * seqlen_k
    else:
        seqlen_q *= STEPS
    q, k = (torch.zeros(1, s, 1, HEAD_DIM, dtype=torch.bfloat16) for s in (seqlen_q, seqlen_k))
    return q, k, k


def _meetings(trace: Trace) -> set[Meet]:
    """Each barrier once, whether warps wait there or only arrive."""
    events = (event for own in trace.events.values() for event in own)
    return {replace(event, waits=True) for event in events if isinstance(event, Meet)}


def _outputs(trace: Trace, names: Operands) -> Iterator[Output]:
    for warp, events in sorted(trace.events.items()):
        for event in events:
            if isinstance(event, Store):
                by = "TMA reduce-add" if event.adds else "TMA store"
                yield Output(warp, names.region(event.address, leaving=True), by)
            elif isinstance(event, Add):
                yield Output(warp, "dQ", "red.add from registers")


def page(found: list[Seen]) -> Iterator[str]:
    """The lines of docs/roles.md."""
    yield INTRO
    for seen in found:
        yield f"## {seen.direction.capitalize()}, {seen.config.tile_m} x {seen.config.tile_n}\n"
        yield from (f"- {line}" for line in seen.lines)
        yield ""
        yield from _graph(seen)
        yield from _tables(seen)
        yield f"![Timeline of the {seen.direction} kernel]({seen.picture})\n"


def _graph(seen: Seen) -> Iterator[str]:
    """The pipelines: who fills what, who reads it, who gives it back."""
    yield "```mermaid\nflowchart LR"
    consumers = sorted({warp for ring in seen.rings for warp in ring.consumers})
    yield f'  readers["consumers: warps {_spans(consumers)}"]'
    for warp in sorted({ring.producer for ring in seen.rings}):
        yield f'  warp{warp}["producer: warp {warp}"]'
    for number, ring in enumerate(seen.rings):
        stages = "1 stage" if ring.stages == 1 else f"{ring.stages} stages"
        name = f"{', '.join(ring.regions)}: {stages} of {ring.nbytes:,} B"
        by = "TMA" if ring.ctas == 1 else f"TMA, 1 part of {ring.ctas}, to all CTAs of the cluster"
        yield f'  warp{ring.producer} -- "{by}" --> ring{number}(["{name}"]) --> readers'
        if ring.reused:
            yield f'  readers -. "{ring.arrivals} arrivals" .-> warp{ring.producer}'
    by_consumers: dict[str, list[str]] = {}
    for output in seen.outputs:
        if output.warp in consumers:
            names = by_consumers.setdefault(output.by, [])
            names += [output.name] if output.name not in names else []
            continue
        warp = f"warp{output.warp}"
        yield f'  readers -- "{output.name} in shared memory" --> {warp}["warp {output.warp}"]'
        yield f'  {warp} -- "{output.name}: {output.by}" --> memory[("memory")]'
    for by, names in by_consumers.items():
        yield f'  readers -- "{", ".join(names)}: {by}" --> memory[("memory")]'
    yield "```\n"


def _tables(seen: Seen) -> Iterator[str]:
    yield "| ring | stages | full: producer -> consumers | empty: consumers -> producer |"
    yield "| --- | ---: | --- | --- |"
    for ring in seen.rings:
        share = f", 1/{ring.ctas} from each CTA" if ring.ctas > 1 else ""
        full = f"1 arrival of warp {ring.producer} + {ring.nbytes:,} bytes{share}"
        empty = f"{ring.arrivals} arrivals" if ring.reused else "filled once"
        yield f"| {' with '.join(ring.regions)} | {ring.stages} | {full} | {empty} |"
    yield ""
    if seen.meetings:
        met = (f"{one.barrier} ({32 * one.warps} threads)" for one in seen.meetings)
        yield f"Named barriers: {', '.join(met)}.\n"
    yield f"Clocks of a step: {seen.step.units}; bound by {seen.step.units.bound.unit}.\n"


def _spans(numbers: list[int]) -> str:
    """4, 5, 6, 7 as 4-7."""
    parts = []
    for _, run in groupby(enumerate(numbers), key=lambda item: item[1] - item[0]):
        found = [number for _, number in run]
        parts.append(f"{found[0]}-{found[-1]}" if len(found) > 1 else str(found[0]))
    return ", ".join(parts)


def files(found: list[Seen]) -> dict[str, str]:
    """What is to lie in docs, by name."""
    made = {seen.picture: draw(seen.bars, seen.step) for seen in found}
    return {"roles.md": "\n".join(page(found)).rstrip() + "\n", **made}


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1] / "docs"
    for name, text in files([see("forward"), see("backward")]).items():
        (folder / name).write_text(text)


if __name__ == "__main__":
    main()
