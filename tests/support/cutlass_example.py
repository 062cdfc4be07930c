"""Runs one of CUTLASS's CuTe DSL examples, unchanged, in the emulator.

    python -m tests.support.cutlass_example ARCH SCHEDULE EXAMPLE.py [its arguments ...]

A script: the example checks its own results against torch, and fails where they differ. Hazards
are printed, one a line, behind "hazard: ".
"""

from __future__ import annotations

import runpy
import sys

from hopperflash.emulator import EmulationRun
from tests.support.posing import emulate_everything, pose_as_gpu


def main(arch: str, schedule: str, *arguments: str) -> None:
    """Executes the example as `__main__` with its own command line."""
    digits = arch.removeprefix("sm_").rstrip("a")
    pose_as_gpu(int(digits[:-1]), int(digits[-1]))
    run = EmulationRun()
    emulate_everything(run, schedule)
    sys.argv = list(arguments)
    runpy.run_path(arguments[0], run_name="__main__")
    assert run.launches, "the example launched no kernel"
    for hazard in run.hazards:
        print("hazard:", hazard)
    print(run.report())


if __name__ == "__main__":
    main(*sys.argv[1:])
