"""Milliseconds for a 128 x 128 tile of the forward: `python -m tests.support.hazard_cost`."""

from __future__ import annotations

import argparse
import time

import torch

import hopperflash

SEQLEN, HEADS, HEAD_DIM = 512, 2, 128


def cost(schedule: str, hazards: str, repeat: int) -> float:
    """The fastest of a few runs, in CPU time."""
    q, k, v = (torch.randn(1, SEQLEN, HEADS, HEAD_DIM).bfloat16() for _ in range(3))
    times = []
    for _ in range(repeat):
        start = time.process_time()
        with hopperflash.emulate("sm_90a", schedule=schedule, hazards=hazards):
            hopperflash.flash_attn_func(q, k, v)
        times.append(time.process_time() - start)
    return 1e3 * min(times) / (HEADS * (SEQLEN // 128) ** 2)


def main() -> None:
    """A line for each set of checks and each schedule."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=4)
    repeat = parser.parse_args().repeat
    for mode in ("full", "basic"):
        for order in ("eager", "lazy", "random"):
            print(f"{mode:6} {order:7} {cost(order, mode, repeat):6.2f} ms")


if __name__ == "__main__":
    main()
