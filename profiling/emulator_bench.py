"""How fast the emulator runs on this machine: the project's own forward, by schedule.

    python -m profiling.emulator_bench [--seqlen N] [--repeat R] [--suite]

Prints CPU milliseconds for each 128 x 128 tile of keys at head dim 128 and million warp
instructions a second, the best of R runs. The kernel is compiled and decoded before.

With --suite it prints the seconds that the first 60 of the tests' named forward cases take
instead, each compared with fp64 and free of hazards: once with an empty compile cache, and once
more when all kernels are compiled and decoded.
"""

from __future__ import annotations

import argparse
import os
import platform
from datetime import date
from tempfile import TemporaryDirectory
from time import perf_counter, process_time
from typing import NamedTuple

import torch

import hopperflash
from hopperflash.runtime.emulation import emulate
from tests.support.cases import FORWARD_CASES, check_forward

HEAD_DIM = 128
TILE = 128
SUITE_CASES = 60
SETTINGS = [("eager", "basic"), ("eager", "full"), ("lazy", "basic"), ("lazy", "full")]


class Speed(NamedTuple):
    """CPU time of one run and what it executed."""

    seconds: float
    tiles: float
    instructions: int

    @property
    def ms_per_tile(self) -> float:
        return 1e3 * self.seconds / self.tiles

    @property
    def million_per_second(self) -> float:
        return self.instructions / self.seconds / 1e6


def measure(seqlen: int, schedule: str, hazards: str) -> Speed:
    """One forward of one head without a mask."""
    shape = (1, seqlen, 1, HEAD_DIM)
    q, k, v = (torch.randn(shape, dtype=torch.bfloat16) for _ in range(3))
    with emulate("sm_90a", schedule=schedule, hazards=hazards) as run:
        start = process_time()
        hopperflash.flash_attn_func(q, k, v)
        seconds = process_time() - start
    tiles = run.counters["wgmma_flops"] / (4 * TILE * TILE * HEAD_DIM)
    return Speed(seconds, tiles, run.counters["warp_instructions"])


def run_suite() -> tuple[float, float]:
    """(wall, CPU) seconds of the suite in the lazy schedule with every check."""
    wall, cpu = perf_counter(), process_time()
    for case in FORWARD_CASES[:SUITE_CASES]:
        with emulate("sm_90a", schedule="lazy", hazards="full") as run:
            check_forward(case, hopperflash.flash_attn_func)
        if run.hazards:
            raise SystemExit(f"{case}: {run.hazards[0]}")
    return perf_counter() - wall, process_time() - cpu


def print_suite() -> None:
    """One row with the compiler's time and one without."""
    with TemporaryDirectory() as folder:
        os.environ["HOPPERFLASH_CACHE_DIR"] = folder
        print(f"{SUITE_CASES} forward cases, lazy, full{'wall s':>12}{'CPU s':>12}")
        for what in ("with compiling", "compiled before"):
            wall, cpu = run_suite()
            print(f"{what:<31}{wall:>12.1f}{cpu:>12.1f}", flush=True)


def main() -> None:
    """Prints the suite's seconds, or one row for each schedule and set of checks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seqlen", type=int, default=512)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--suite", action="store_true")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    print(f"{date.today()}, {platform.processor() or platform.machine()}, load {load:.1f}")
    if options.suite:
        print_suite()
        return
    print(f"{'schedule':<10}{'hazards':<10}{'ms/tile':>10}{'M warp instr/s':>18}")
    measure(TILE, "eager", "basic")
    for schedule, hazards in SETTINGS:
        runs = [measure(options.seqlen, schedule, hazards) for _ in range(options.repeat)]
        best = min(runs, key=lambda run: run.seconds)
        row = f"{best.ms_per_tile:>10.2f}{best.million_per_second:>18.2f}"
        print(f"{schedule:<10}{hazards:<10}{row}")


if __name__ == "__main__":
    main()
