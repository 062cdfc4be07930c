"""Milliseconds per 128 x 128 tile of the forward kernel: `PYTHONPATH=. python tests/support/hazard_cost.py`."""  # noqa: E501

from __future__ import annotations

import os
import time

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import torch

import hopperflash

SEQLEN, HEADS, HEAD_DIM, REPEATS = 512, 2, 128, 4


def cost(schedule: str, hazards: str) -> float:
    """The fastest of a few runs, in CPU time."""
    q, k, v = (torch.randn(1, SEQLEN, HEADS, HEAD_DIM).bfloat16() for _ in range(3))
    times = []
    for _ in range(REPEATS):
        start = time.process_time()
        with hopperflash.emulate("sm_90a", schedule=schedule, hazards=hazards):
            hopperflash.flash_attn_func(q, k, v)
        times.append(time.process_time() - start)
    return 1e3 * min(times) / (HEADS * (SEQLEN // 128) ** 2)


if __name__ == "__main__":
    for mode in ("full", "basic"):
        for order in ("eager", "lazy", "random"):
            print(f"{mode:6} {order:7} {cost(order, mode):6.2f} ms")
