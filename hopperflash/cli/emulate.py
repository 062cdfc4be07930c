"""`hopperflash emulate`: execute a problem's kernels in the emulator; counters and hazards."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Annotated

import typer

from hopperflash.cli.options import ProblemOptions, Seed, command, flag
from hopperflash.cli.output import WRONG, Stages, print_json, stages, stderr, stdout
from hopperflash.errors import InvalidArgument, UnsupportedProblem

if TYPE_CHECKING:
    from hopperflash.emulator import EmulationRun

DIRECTIONS = ("forward", "backward")


@dataclass(frozen=True)
class EmulateOptions(ProblemOptions):
    """What `hopperflash emulate` takes."""

    arch: Annotated[str, flag("Target, such as sm_90a.")] = "sm_90a"
    direction: Annotated[str, flag("forward, or backward after it.")] = "forward"
    schedule: Annotated[str, flag("When asynchronous work lands: eager, lazy, random.")] = "lazy"
    seed: Seed = 0
    json: Annotated[bool, flag("Print one JSON document.", "--json")] = False


@command(EmulateOptions)
def emulate(options: EmulateOptions) -> None:
    """Execute a problem's kernels on random inputs and print what they did.

    Launches, instructions by class, tensor-core work by shape, bytes by memory, bank conflicts and
    waits, for each kernel and in all. Exits 1 if a hazard was seen, 2 if refused. What the kernels
    computed is not looked at: `hopperflash demo` compares it with a reference.
    """
    if options.direction not in DIRECTIONS:
        raise InvalidArgument(f"--direction is {options.direction!r}: give forward or backward")
    with stages() as progress:
        progress.enter("loading torch")
        start = perf_counter()
        run = _executed(options, progress)
        seconds = perf_counter() - start
    if options.json:
        print_json({
            "ok": not run.hazards,
            "launches": run.launches,
            "counters": run.counters,
            "kernels": run.kernels,
            "hazards": run.hazards,
            "seconds": seconds,
        })  # fmt: skip
    else:
        stdout().print(run.report(), markup=False)
    if run.hazards:
        stderr().print(f"WRONG: {len(run.hazards)} hazards", markup=False)
        raise typer.Exit(WRONG)


def _executed(options: EmulateOptions, progress: Stages) -> EmulationRun:
    import torch

    from hopperflash.cli.inputs import random_attention
    from hopperflash.emulator import EmulationError
    from hopperflash.runtime import emulation

    attention = random_attention(options, options.seed)
    backward = options.direction == "backward"
    for operand in (attention.q, attention.k, attention.v):
        operand.requires_grad_(backward)
    try:
        with emulation.emulate(
            options.arch, schedule=options.schedule, seed=options.seed, progress=progress.advance
        ) as run:
            progress.enter("executing CTAs")
            out, _ = attention.forward()
            if backward:
                torch.autograd.backward(out.sum())
    except EmulationError as error:
        stderr().print(f"WRONG: the kernel failed: {error}", markup=False)
        raise typer.Exit(WRONG) from None
    if not run.launches:
        raise UnsupportedProblem("nothing to run: this problem launches no kernel")
    return run
