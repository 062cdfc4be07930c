"""`hopperflash demo`: run the real kernels and hold the results against the reference."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hopperflash.cli.options import Seed, SizeOptions, Sizes, command, flag
from hopperflash.cli.output import WRONG, print_json, stages, stderr, stdout
from hopperflash.errors import InvalidArgument

if TYPE_CHECKING:
    from hopperflash.cli.inputs import Inputs

NEEDS_A_FILE = "Read tensors q, k, v (and metadata causal) from a safetensors file."


@dataclass(frozen=True)
class DemoOptions(SizeOptions):
    """What `hopperflash demo` takes."""

    input: Annotated[Path | None, flag(NEEDS_A_FILE, metavar="FILE.safetensors")] = None
    arch: Annotated[str, flag("Target; emulated unless a GPU of it is there.")] = "sm_90a"
    schedule: Annotated[str, flag("When asynchronous work lands: eager, lazy, random.")] = "lazy"
    seed: Seed = 0
    backward: Annotated[bool, flag("Also the gradients.", "--backward")] = False
    json: Annotated[bool, flag("Print one JSON document.", "--json")] = False


@command(DemoOptions)
def demo(options: DemoOptions) -> None:
    """Run the kernels on real numbers and compare O and LSE with fp64.

    With --backward also dQ, dK and dV, from random gradients of O and of the LSE.

    Without a GPU the kernels of --arch are compiled and run in the emulator. Exits 0 only if all
    results are inside the tolerance and no hazard was seen, 1 if not, 2 if refused.
    """
    with stages() as progress:
        progress.enter("loading torch")
        from hopperflash.cli import demo_report
        from hopperflash.cli.demonstration import Execution, demonstrate
        from hopperflash.emulator import EmulationError

        try:
            execution = Execution(options.arch, options.schedule, options.seed, options.backward)
            shown = demonstrate(inputs_of(options), execution, progress)
        except EmulationError as error:
            stderr().print(f"WRONG: the kernel failed: {error}", markup=False)
            raise typer.Exit(WRONG) from None
    if options.json:
        print_json(demo_report.as_data(shown))
    else:
        demo_report.show(shown, stdout())
    for failure in shown.failures:
        stderr().print(f"WRONG: {failure}", markup=False)
    if shown.failures:
        raise typer.Exit(WRONG)


def inputs_of(options: DemoOptions) -> Inputs:
    """Tensors of the file, or random ones; a size beside a file would be ignored and is refused."""
    from hopperflash.cli.inputs import random_inputs, read_inputs

    if options.input is None:
        return random_inputs(Sizes.of(options), options.seed)
    sizes = [field.name for field in fields(SizeOptions) if field.name != "causal"]
    beside = [f"--{name.replace('_', '-')}" for name in sizes if getattr(options, name) is not None]
    if beside:
        raise InvalidArgument(f"--input gives the sizes: leave {', '.join(beside)} away")
    return read_inputs(options.input, options.causal)
