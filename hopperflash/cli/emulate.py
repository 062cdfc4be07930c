"""`hopperflash emulate`: execute a problem's kernels in the emulator; counters and hazards."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Annotated

import typer

from hopperflash.cli.explain import window_of
from hopperflash.cli.options import Seed, SizeOptions, Sizes, command, flag
from hopperflash.cli.output import WRONG, Stages, print_json, stages, stderr, stdout
from hopperflash.errors import InvalidArgument, UnsupportedProblem

if TYPE_CHECKING:
    from hopperflash.emulator import EmulationRun

DIRECTIONS = ("forward", "backward")


@dataclass(frozen=True)
class EmulateOptions(SizeOptions):
    """What `hopperflash emulate` takes."""

    window: Annotated[str | None, flag("LEFT,RIGHT keys a query sees; -1 is unbounded.")] = None
    softcap: Annotated[float, flag("Caps scores at this; 0 for none.")] = 0.0
    arch: Annotated[str, flag("Target, such as sm_90a.")] = "sm_90a"
    direction: Annotated[str, flag("forward; the backward comes next.")] = "forward"
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
    if options.direction == "backward":
        raise UnsupportedProblem("no backward kernels yet: they come next; emulate the forward")
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
    from hopperflash import api
    from hopperflash.cli.inputs import random_inputs
    from hopperflash.emulator import EmulationError
    from hopperflash.runtime import emulation

    inputs = random_inputs(Sizes.of(options), options.seed)
    causal = inputs.causal if options.window is None else options.causal is True
    try:
        with emulation.emulate(
            options.arch, schedule=options.schedule, seed=options.seed, progress=progress.advance
        ) as run:
            progress.enter("executing CTAs")
            api.flash_attn_func(
                *inputs.operands,
                causal=causal,
                window_size=window_of(options.window),
                softcap=options.softcap,
            )
    except EmulationError as error:
        stderr().print(f"WRONG: the kernel failed: {error}", markup=False)
        raise typer.Exit(WRONG) from None
    if not run.launches:
        raise UnsupportedProblem("nothing to run: this problem launches no kernel")
    return run
