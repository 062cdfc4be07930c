"""Backward from stored probabilities against recomputed ones: time, peak memory, bytes, by length.

    python -m profiling.stored_vs_recomputed [--device cpu|cuda] [--lengths 512 1024 ...]
        [--repeat R] [--json PATH] [--table PATH]

Batch 2, 16 heads, head dim 64, bf16, no mask; both ways get the same operands and the same dO.
"stored" keeps P of the forward, as a chain of matrix products under autograd does; "recomputed" is
`hopperflash.flash_attn_func`. Every case has a process of its own and its peak memory is that
process's, less what it had before the forward; on a GPU it is the allocator's. Seconds are the
median of R runs of the backward alone. Bytes through global memory are those of the model for the
Hopper kernels (docs/io.md), behind the L2 of an H100.

Gradients of both ways are compared with fp64 at every length, over one head of one batch entry.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import hopperflash
from hopperflash.analysis.tiled_traffic import L2, tiled_traffic
from hopperflash.analysis.traffic import materialized_traffic
from hopperflash.problem.mask import MaskSpec
from hopperflash.reference import materialized_attention

BATCH, HEADS, HEAD_DIM = 2, 16, 64
SCALE = HEAD_DIM**-0.5
LENGTHS = (512, 1024, 2048, 4096)
WAYS = ("stored", "recomputed")
H100 = L2(50 << 20, 132)
RMS_ALLOWED = 0.02  # of the gradient's own; bf16 has 2^-9 a rounding


@dataclass(frozen=True)
class Measurement:
    """One way at one length; `errors` are those of dQ, dK and dV, relative RMS."""

    seqlen: int
    way: str
    device: str
    seconds: float
    peak_bytes: int
    moved_bytes: int
    errors: tuple[float, float, float]

    @property
    def right(self) -> bool:
        return max(self.errors) <= RMS_ALLOWED


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
        errors=_errors((q, k, v, dout), gradients),
    )


def moved_bytes(seqlen: int, way: str) -> int:
    """Of the backward alone; both ways read what their forward left."""
    x = torch.empty(BATCH, seqlen, HEADS, HEAD_DIM, dtype=torch.bfloat16, device="meta")
    plan = hopperflash.make_plan(x, x, x, arch="sm_90a", direction="backward")
    if way == "stored":
        return materialized_traffic(plan.problem, "backward").total
    return tiled_traffic(plan).behind(H100).total


def crossover(found: Sequence[Measurement], better: Callable[[Measurement], float]) -> int | None:
    """The length from which on the recomputed backward is better at every length measured."""
    pairs: dict[int, dict[str, float]] = {}
    for one in found:
        pairs.setdefault(one.seqlen, {})[one.way] = better(one)
    first = None
    for seqlen in sorted(pairs, reverse=True):
        if pairs[seqlen]["recomputed"] > pairs[seqlen]["stored"]:
            break
        first = seqlen
    return first


def table(found: Sequence[Measurement]) -> str:
    """Markdown: a row for each length."""
    lines = [
        "| length | seconds stored | recomputed | ratio | peak MB stored | recomputed | ratio"
        " | moved MB stored | recomputed | ratio |",
        "| ---: " * 10 + "|",
    ]
    for seqlen in sorted({one.seqlen for one in found}):
        one, other = (next(x for x in found if (x.seqlen, x.way) == (seqlen, way)) for way in WAYS)
        cells = [f"{seqlen:,}"]
        for name, scale, form in (
            ("seconds", 1.0, ".3g"), ("peak_bytes", 1e6, ",.0f"), ("moved_bytes", 1e6, ",.0f")
        ):  # fmt: skip
            first, second = getattr(one, name), getattr(other, name)
            cells += [
                f"{first / scale:{form}}",
                f"{second / scale:{form}}",
                f"{first / second:.2f}",
            ]
        lines.append(f"| {' | '.join(cells)} |")
    for what, name in (("latency", "seconds"), ("peak memory", "peak_bytes")):
        length = crossover(found, lambda x, name=name: getattr(x, name))
        words = "at no length measured" if length is None else f"from {length:,} on"
        lines.append(f"\nRecomputing has the lower {what} {words}.")
    return "\n".join(lines)


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
    parser.add_argument("--table", type=Path)
    chosen = parser.parse_args()
    found = [
        _in_a_process((seqlen, way, chosen.device, chosen.repeat))
        for seqlen in chosen.lengths
        for way in WAYS
    ]
    text = f"{date.today()}, {found[0].device}, torch {torch.__version__}\n\n{table(found)}\n"
    print(text)
    if chosen.table is not None:
        chosen.table.write_text(text)
    if chosen.json is not None:
        chosen.json.write_text(json.dumps([asdict(one) for one in found], indent=1))
    wrong = [one for one in found if not one.right]
    if wrong:
        raise SystemExit(f"gradients are off: {wrong}")


if __name__ == "__main__":
    main()
