"""How fast the emulator runs on this machine: the project's own forward, by schedule.

    python -m profiling.emulator_bench [--seqlen N] [--repeat R]

Prints CPU milliseconds for each 128 x 128 tile of keys at head dim 128 and million warp
instructions a second, the best of R runs. The kernel is compiled and decoded before.
"""

from __future__ import annotations

import argparse
import os
import platform
from datetime import date
from time import process_time
from typing import NamedTuple

import torch

import hopperflash
from hopperflash.runtime.emulation import emulate

HEAD_DIM = 128
TILE = 128
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


def main() -> None:
    """Prints one row for each schedule and set of checks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seqlen", type=int, default=512)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    print(f"{date.today()}, {platform.processor() or platform.machine()}, load {load:.1f}")
    print(f"{'schedule':<10}{'hazards':<10}{'ms/tile':>10}{'M warp instr/s':>18}")
    measure(TILE, "eager", "basic")
    for schedule, hazards in SETTINGS:
        runs = [measure(options.seqlen, schedule, hazards) for _ in range(options.repeat)]
        best = min(runs, key=lambda run: run.seconds)
        row = f"{best.ms_per_tile:>10.2f}{best.million_per_second:>18.2f}"
        print(f"{schedule:<10}{hazards:<10}{row}")


if __name__ == "__main__":
    main()
