"""Backward from stored probabilities against recomputed ones: time, peak memory, bytes, by length.

    python -m profiling.stored_vs_recomputed [--device cpu|cuda] [--lengths 64 128 ...]
        [--repeat R] [--limit SECONDS] [--emulate LENGTHS] [--ncu] [--json PATH] [--write FOLDER]
    python -m profiling.stored_vs_recomputed --refresh FOLDER

The problem and its two ways are in `recomputation.py`. Every case has a process of its own.

Seconds are of the backward alone: on a GPU by CUDA events around single calls, L2 overwritten
before each; on a CPU by the clock, at least R calls, more of short ones, and no further call after
`--limit` seconds. Peak memory is what forward and backward added: to the allocator of a GPU, to
resident memory on a CPU. Bytes through global memory are those of the model for the Hopper kernels
(docs/io.md), behind the L2 of an H100; so are FLOP. `--emulate` counts them at these lengths,
`--ncu` those of DRAM on the GPU at hand.

Gradients of both ways are compared with fp64 at every length, over one head of one batch entry.

`--write docs` writes docs/stored_vs_recomputed.md and its plot (`recomputation_report.py`);
`--refresh docs` measures nothing and writes only the model's and the emulator's part of the page,
after a change of plans. Exit status: 1 where a gradient or a modelled byte is wrong, 2 where ncu
cannot run.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hopperflash.bench.timing import Timer
from hopperflash.errors import HopperflashError
from hopperflash.problem.mask import MaskSpec
from hopperflash.reference import materialized_attention
from profiling import recomputation_bytes, recomputation_report
from profiling.recomputation import SCALE, WAYS, Operands
from profiling.recomputation_bytes import Counted
from profiling.recomputation_report import Circumstances, Measurement

LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096)
EMULATED = (64, 128, 256, 512)
REPEAT = {"cpu": 5, "cuda": 20}
STEADY = 5.0  # seconds of calls on a CPU, which short ones need for a steady median


def measure(seqlen: int, way: str, device: str, repeat: int, limit: float) -> Measurement:
    """Runs one case in this process, whose peak memory counts."""
    # What libraries set up once is no part of it.
    Operands.random(8, device).forward(way)()
    operands = Operands.random(seqlen, device)
    before = _memory(device, reset=True)
    backward = operands.forward(way)
    start = time.perf_counter()
    gradients = backward()
    first = time.perf_counter() - start
    peak = _memory(device) - before
    seconds = (
        Timer(device).sample(backward, "cold", repeat)
        if device == "cuda"
        else _by_the_clock(backward, first, repeat, limit)
    )
    return replace(
        by_the_model(seqlen, way),
        device=torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
        runs=len(seconds),
        seconds=statistics.median(seconds),
        peak_bytes=peak,
        errors=_errors(operands, gradients),
    )


def by_the_model(seqlen: int, way: str) -> Measurement:
    """A case of which nothing was measured."""
    return Measurement(
        seqlen=seqlen,
        way=way,
        device="",
        runs=0,
        seconds=math.nan,
        peak_bytes=0,
        moved_bytes=recomputation_bytes.moved_bytes(seqlen, way),
        flops=recomputation_bytes.flops(seqlen, way),
        errors=(math.nan,) * 3,
    )


def _by_the_clock(
    call: Callable[[], object], first: float, repeat: int, limit: float
) -> list[float]:
    """Seconds of single calls, of which the first took `first`."""
    found = [first]
    while sum(found) < limit and (len(found) < repeat or sum(found) < STEADY):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return found


def _errors(operands: Operands, gradients: Sequence[Tensor]) -> tuple[float, ...]:
    """Relative RMS of dQ, dK and dV of the first head of the first batch entry against fp64."""
    x = operands
    *leaves, dout = (t.detach()[:1, :, :1].cpu().double() for t in (x.q, x.k, x.v, x.dout))
    for leaf in leaves:
        leaf.requires_grad_()
    out, _ = materialized_attention(*leaves, MaskSpec(), softmax_scale=SCALE)
    wanted = torch.autograd.grad(out, leaves, dout)
    found = (gradient[:1, :, :1].cpu().double() for gradient in gradients)
    return tuple(
        float((one - want).norm() / want.norm()) for one, want in zip(found, wanted, strict=True)
    )


def _memory(device: str, *, reset: bool = False) -> int:
    """Bytes in use at most since the reset, which itself tells those in use."""
    if device == "cuda":
        if reset:
            torch.cuda.reset_peak_memory_stats()
        return torch.cuda.max_memory_allocated()
    if reset:
        Path("/proc/self/clear_refs").write_text("5")  # the mark of VmHWM
    lines = Path("/proc/self/status").read_text().splitlines()
    (mark,) = (line for line in lines if line.startswith("VmHWM"))
    return int(mark.split()[1]) * 1024


def _in_a_process(work: Callable[..., Any], *arguments: Any) -> Any:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(work, arguments)


def _cases(chosen: argparse.Namespace, repeat: int) -> list[Measurement]:
    """Every length in both ways."""
    cases = [(seqlen, way) for seqlen in chosen.lengths for way in WAYS]
    counted = _counted_by_ncu(cases) if chosen.ncu else {}
    return [
        replace(
            _in_a_process(measure, *case, chosen.device, repeat, chosen.limit),
            dram_bytes=counted.get(case),
        )
        for case in cases
    ]


def _counted_by_ncu(cases: Sequence[tuple[int, str]]) -> dict[tuple[int, str], int]:
    recomputation_bytes.require_nsight_compute()
    with tempfile.TemporaryDirectory() as folder:
        return {case: recomputation_bytes.by_nsight_compute(*case, Path(folder)) for case in cases}


def _emulated(lengths: Sequence[int]) -> list[Counted]:
    """Counts at these lengths; ends the run where the model says otherwise."""
    counts = [recomputation_bytes.emulated(seqlen) for seqlen in lengths]
    wrong = [one for one in counts if not one.as_modelled]
    if wrong:
        raise SystemExit(f"the model has other bytes than the emulator: {wrong}")
    return counts


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--repeat", type=int)
    parser.add_argument("--limit", type=float, default=300.0)
    parser.add_argument("--emulate", type=int, nargs="+", default=EMULATED)
    parser.add_argument("--ncu", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--write", type=Path, metavar="FOLDER")
    parser.add_argument("--refresh", type=Path, metavar="FOLDER")
    return parser


def _run(chosen: argparse.Namespace) -> None:
    least = recomputation_bytes.least_length()
    if chosen.refresh is not None:
        cases = [by_the_model(seqlen, way) for seqlen in LENGTHS for way in WAYS]
        recomputation_report.refresh(cases, least, _emulated(EMULATED), chosen.refresh)
        return
    repeat = chosen.repeat or REPEAT[chosen.device]
    now = Circumstances.now(chosen.device, repeat)
    found = _cases(chosen, repeat)
    print("\n".join(recomputation_report.measured(found, now)))
    if chosen.json is not None:
        chosen.json.write_text(json.dumps([asdict(one) for one in found], indent=1))
    wrong = [one for one in found if not one.right]
    if wrong:
        raise SystemExit(f"gradients are off: {wrong}")
    if chosen.write is not None:
        counts = _emulated(chosen.emulate)
        recomputation_report.write(found, now, least, counts, chosen.write)


def main(arguments: Sequence[str] | None = None) -> None:
    """Fails where a gradient or the model is wrong."""
    try:
        _run(_parser().parse_args(arguments))
    except HopperflashError as refused:
        print(refused, file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
