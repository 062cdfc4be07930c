"""Bytes through global memory of a stored and a recomputed backward: modelled, counted."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path

import torch

import hopperflash
from hopperflash import plan
from hopperflash.analysis.tiled_traffic import L2, tiled_traffic
from hopperflash.analysis.traffic import materialized_traffic
from hopperflash.errors import InvalidArgument
from hopperflash.plan import LaunchPlan
from hopperflash.profiler import metrics, ncu, tools
from hopperflash.profiler.tools import ProfilerFailed
from profiling.recomputation import BATCH, HEAD_DIM, HEADS, Operands

ARCH = "sm_90a"
H100 = L2(50 << 20, 132)


@dataclass(frozen=True)
class Counted:
    """The recomputed backward in the emulator, and the model: bytes that its kernels ask for, and
    each byte once for every kernel, those of sums in memory as read and as written."""

    seqlen: int
    asked: int
    asked_model: int
    once: int
    once_model: int

    @classmethod
    def by_the_model(cls, seqlen: int) -> Counted:
        """What is to be counted."""
        model = tiled_traffic(plan_of(seqlen))
        asked, once = model.asked.total, model.once.total + dq_sums(seqlen)
        return cls(seqlen, asked, asked, once, once)

    @property
    def as_modelled(self) -> bool:
        return (self.asked, self.once) == (self.asked_model, self.once_model)


def plan_of(seqlen: int) -> LaunchPlan:
    """Of the recomputed backward for Hopper."""
    x = torch.empty(BATCH, seqlen, HEADS, HEAD_DIM, dtype=torch.bfloat16, device="meta")
    return hopperflash.make_plan(x, x, x, arch=ARCH, direction="backward")


def dq_sums(seqlen: int) -> int:
    """Bytes of what the kernels add up dQ in."""
    streams = tiled_traffic(plan_of(seqlen)).streams
    return sum(x.once for x in streams if (x.kernel, x.operand) == ("backward", "dQ sums"))


def moved_bytes(seqlen: int, way: str) -> int:
    """By the model, of the backward alone; both ways read what their forward left."""
    planned = plan_of(seqlen)
    if way == "stored":
        return materialized_traffic(planned.problem, "backward").total
    return tiled_traffic(planned).behind(H100).total


def flops(seqlen: int, way: str) -> int:
    """Of the products of the backward alone: four, and that of Q and K again where recomputed."""
    recomputed = plan_of(seqlen).problem.useful_flops("backward")
    scores = 2 * BATCH * HEADS * seqlen**2 * HEAD_DIM
    return recomputed if way == "recomputed" else recomputed - scores


def least_length() -> int:
    """The length from which on the recomputed backward moves less, in steps of 8, by the model."""
    lengths = range(512, 0, -8)
    return min(
        takewhile(lambda n: moved_bytes(n, "recomputed") < moved_bytes(n, "stored"), lengths)
    )


def emulated(seqlen: int) -> Counted:
    """Executes the kernels of the recomputed backward, all heads of the batch."""
    x = Operands.random(seqlen, "cpu")
    q, k, v = (operand.detach() for operand in (x.q, x.k, x.v))
    out, lse = hopperflash.flash_attn_func(q, k, v, return_lse=True)
    with hopperflash.emulate(ARCH, schedule="eager", hazards="basic") as run:
        hopperflash.flash_attn_backward(x.dout, q, k, v, out, lse)
    asked = ("tma_load", "global_load", "tma_store", "global_store", "global_atomic")
    once = ("unique_global_load", "unique_global_store")
    return replace(
        Counted.by_the_model(seqlen),
        asked=sum(run.counters[f"{name}_bytes"] for name in asked),
        once=sum(run.counters[f"{name}_bytes"] for name in once),
    )


def by_nsight_compute(seqlen: int, way: str, folder: Path) -> int:
    """DRAM bytes of a way's backward on this machine's GPU; leaves the report in a folder.

    Nothing empties the caches between its kernels, as in use: what one of them wrote into L2
    reaches DRAM while a later one runs, and is counted there.
    """
    arch = plan.arch_of_capability(torch.cuda.get_device_capability()).name
    settings = ncu.Settings(
        arch,
        folder / f"{way}-{seqlen}{ncu.SUFFIX}",
        cache_control="none",
        kernels=None,
        quantities=(metrics.DRAM_READ, metrics.DRAM_WRITTEN),
    )
    target = (sys.executable, "-m", "profiling.recomputation", way, str(seqlen))
    tools.run(ncu.command(target, settings, ncu.known_metrics(arch)))
    return dram_bytes(settings.report)


def dram_bytes(report: Path) -> int:
    """Read and written by all launches of a report; `InvalidArgument` where one was not counted."""
    total = 0.0
    for launch in ncu.launches_of(report):
        found = [x.of(launch.metrics) for x in (metrics.DRAM_READ, metrics.DRAM_WRITTEN)]
        if None in found:
            raise InvalidArgument(f"{report}: no bytes of DRAM were counted of {launch.name}")
        total += sum(x for x in found if x is not None)
    return round(total)


def require_nsight_compute() -> None:
    """Raises `ProfilerFailed` with everything that keeps it from counting here."""
    obstacles = tools.obstacles(ncu.TOOL, counters=True)
    if obstacles:
        raise ProfilerFailed("Nsight Compute cannot count bytes here:", obstacles)
