"""Backward from stored probabilities against recomputed ones: time, peak memory, bytes, by length.

    python -m profiling.stored_vs_recomputed [--device cpu|cuda] [--lengths 512 1024 ...]
        [--repeat R] [--json PATH] [--write FOLDER]
    python -m profiling.stored_vs_recomputed --refresh FOLDER

`--write docs` writes docs/stored_vs_recomputed.md and its plot (`recomputation_report.py`);
`--refresh docs` measures nothing and writes only the model's half of the page, after a change of
plans.

Batch 2, 16 heads, head dim 64, bf16, no mask; both ways get the same operands and the same dO.
"stored" keeps P of the forward, as a chain of matrix products under autograd does; "recomputed" is
`hopperflash.flash_attn_func`. Every case has a process of its own and its peak memory is that
process's, less what it had before the forward; on a GPU it is the allocator's. Seconds are the
median of R runs of the backward alone. Bytes through global memory are those of the model for the
Hopper kernels (docs/io.md), behind the L2 of an H100; so are FLOP.

Gradients of both ways are compared with fp64 at every length, over one head of one batch entry.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import platform
import resource
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import hopperflash
from hopperflash.analysis.tiled_traffic import L2, tiled_traffic
from hopperflash.analysis.traffic import materialized_traffic
from hopperflash.plan import LaunchPlan
from hopperflash.problem.mask import MaskSpec
from hopperflash.reference import materialized_attention
from profiling import recomputation_report
from profiling.recomputation_report import WAYS, Measurement

BATCH, HEADS, HEAD_DIM = 2, 16, 64
SCALE = HEAD_DIM**-0.5
LENGTHS = (512, 1024, 2048, 4096)
H100 = L2(50 << 20, 132)


class StoredAttention(torch.autograd.Function):
    """Softmax attention that keeps its probabilities, (batch, heads, seqlen, ...)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        probabilities = torch.softmax((q @ k.mT).float().mul_(SCALE), dim=-1).to(q.dtype)
        ctx.save_for_backward(q, k, v, probabilities)
        return probabilities @ v

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, ...]:
        q, k, v, probabilities = ctx.saved_tensors
        dv = probabilities.mT @ dout
        dscores = (dout @ v.mT).float()
        dscores -= (dscores * probabilities).sum(dim=-1, keepdim=True)
        dscores = dscores.mul_(probabilities).mul_(SCALE).to(q.dtype)
        return dscores @ k, dscores.mT @ q, dv


def stored(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Operands and result (batch, seqlen, heads, head_dim)."""
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    return StoredAttention.apply(*heads_first).transpose(1, 2)


def measure(seqlen: int, way: str, device: str, repeat: int) -> Measurement:
    """Runs one case in this process, whose peak memory counts."""
    torch.manual_seed(seqlen)
    shape = (BATCH, seqlen, HEADS, HEAD_DIM)
    q, k, v, dout = (torch.randn(shape).bfloat16().to(device) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    attend = stored if way == "stored" else hopperflash.flash_attn_func
    before = _peak(device, reset=True)
    out = attend(*leaves)
    gradients, seconds = [], []
    for _ in range(repeat):
        start = _now(device)
        gradients = torch.autograd.grad(out, leaves, dout, retain_graph=True)
        seconds.append(_now(device) - start)
    peak = _peak(device) - before
    return Measurement(
        seqlen=seqlen,
        way=way,
        device=torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
        seconds=statistics.median(seconds),
        peak_bytes=peak,
        moved_bytes=moved_bytes(seqlen, way),
        flops=flops(seqlen, way),
        errors=_errors((q, k, v, dout), gradients),
    )


def moved_bytes(seqlen: int, way: str) -> int:
    """Of the backward alone; both ways read what their forward left."""
    plan = _plan(seqlen)
    if way == "stored":
        return materialized_traffic(plan.problem, "backward").total
    return tiled_traffic(plan).behind(H100).total


def flops(seqlen: int, way: str) -> int:
    """Of the products of the backward alone: four, and that of Q and K again where recomputed."""
    recomputed = _plan(seqlen).problem.useful_flops("backward")
    scores = 2 * BATCH * HEADS * seqlen**2 * HEAD_DIM
    return recomputed if way == "recomputed" else recomputed - scores


def by_the_model(seqlen: int, way: str) -> Measurement:
    """A case of which nothing was measured."""
    unknown = (math.nan,) * 3
    return Measurement(
        seqlen, way, "", math.nan, 0, moved_bytes(seqlen, way), flops(seqlen, way), unknown
    )


def least_length() -> int:
    """The length from which on the recomputed backward moves less, in steps of 8, by the model."""
    lengths = range(LENGTHS[0], 0, -8)
    return min(
        takewhile(lambda n: moved_bytes(n, "recomputed") < moved_bytes(n, "stored"), lengths)
    )


def _plan(seqlen: int) -> LaunchPlan:
    x = torch.empty(BATCH, seqlen, HEADS, HEAD_DIM, dtype=torch.bfloat16, device="meta")
    return hopperflash.make_plan(x, x, x, arch="sm_90a", direction="backward")


def _errors(operands: tuple[Tensor, ...], gradients: Sequence[Tensor]) -> tuple[float, ...]:
    """Relative RMS of dQ, dK and dV of the first head of the first batch entry against fp64."""
    q, k, v, dout = (x.detach()[:1, :, :1].cpu().double() for x in operands)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, _ = materialized_attention(*leaves, MaskSpec(), softmax_scale=SCALE)
    wanted = torch.autograd.grad(out, leaves, dout)
    found = (x[:1, :, :1].cpu().double() for x in gradients)
    return tuple(
        float((x - want).norm() / want.norm()) for x, want in zip(found, wanted, strict=True)
    )


def _peak(device: str, *, reset: bool = False) -> int:
    """Bytes of the largest extent so far; a CPU process's is resident memory and only grows."""
    if device == "cuda":
        if reset:
            torch.cuda.reset_peak_memory_stats()
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _in_a_process(arguments: tuple[int, str, str, int]) -> Measurement:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure, arguments)


def main() -> None:
    """Fails where a gradient is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--write", type=Path, metavar="FOLDER")
    parser.add_argument("--refresh", type=Path, metavar="FOLDER")
    chosen = parser.parse_args()
    if chosen.refresh is not None:
        cases = [by_the_model(seqlen, way) for seqlen in LENGTHS for way in WAYS]
        recomputation_report.refresh(cases, least_length(), chosen.refresh)
        return
    where = recomputation_report.circumstances(chosen.device, chosen.repeat)
    found = [
        _in_a_process((seqlen, way, chosen.device, chosen.repeat))
        for seqlen in chosen.lengths
        for way in WAYS
    ]
    print("\n".join(recomputation_report.measured(found, where)))
    if chosen.json is not None:
        chosen.json.write_text(json.dumps([asdict(one) for one in found], indent=1))
    wrong = [one for one in found if not one.right]
    if wrong:
        raise SystemExit(f"gradients are off: {wrong}")
    if chosen.write is not None:
        recomputation_report.write(found, where, least_length(), chosen.write)


if __name__ == "__main__":
    main()
