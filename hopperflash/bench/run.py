"""Rows of a benchmark: a result is judged first, and timed only where it is right."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from importlib import metadata
from typing import Literal

import torch
from torch import Tensor

import hopperflash
from hopperflash.bench import timing
from hopperflash.bench.cases import CONVENTIONS, Shape
from hopperflash.bench.clocks import ClockReader, Clocks
from hopperflash.bench.implementations import OURS, Attend, Implementation
from hopperflash.bench.judge import Judge, Operands
from hopperflash.bench.timing import CacheState, Effort, Spread, Timer
from hopperflash.errors import HopperflashError
from hopperflash.problem import Direction
from hopperflash.tolerance import Deviation

# What is timed, and its first results by name.
Prepared = tuple[Callable[[], object], dict[str, Tensor]]
LIBRARIES = (
    "nvidia-cutlass-dsl",
    "nvidia-cudnn-cu12",
    "nvidia-cudnn-cu13",
    "flash-attn",
    "flash-attn-3",
    "flash-attn-4",
)
Status = Literal["timed", "WRONG", "failed", "refused"]


@dataclass(frozen=True)
class Row:
    """One implementation, one shape, one direction, one state of the cache.

    `status` is "timed"; or "WRONG", with the errors in `why`; or "refused", by a peer that cannot,
    or by the package with its reasons; or "failed", where the package broke.
    """

    implementation: str
    shape: Shape
    direction: Direction
    cache: CacheState
    status: Status
    why: str
    errors: dict[str, Deviation]
    flops: int
    seconds: Spread | None
    clocks: Clocks | None

    @property
    def flops_per_second(self) -> float | None:
        """At the median."""
        return None if self.seconds is None else self.flops / self.seconds.median


@dataclass(frozen=True)
class Machine:
    """Where it was measured, and by what."""

    device: str
    name: str
    host: str
    torch: str
    hopperflash: str
    cuda: str | None
    libraries: dict[str, str]  # versions of what else computes here
    started: str
    clocks: str  # why none are noted; "" where they are


@dataclass(frozen=True)
class Benchmark:
    """What is printed, and written as JSON and HTML."""

    machine: Machine
    conventions: tuple[str, ...]
    effort: Effort
    flush_bytes: int
    absent: dict[str, str]
    rows: tuple[Row, ...]

    @property
    def failures(self) -> list[Row]:
        """What of this package is wrong, or broke; a peer's errors are the peer's."""
        return [
            row
            for row in self.rows
            if row.implementation == OURS and row.status in ("WRONG", "failed")
        ]

    @property
    def unit(self) -> tuple[str, float]:
        """In which speeds are told, and FLOP/s in one."""
        return ("GFLOP/s", 1e9) if self.machine.device == "cpu" else ("TFLOP/s", 1e12)


@dataclass(frozen=True)
class Settings:
    """How to run, on "cpu" or "cuda"."""

    device: str
    directions: Sequence[Direction]
    caches: Sequence[CacheState]
    effort: Effort
    seed: int = 0


def benchmark(
    shapes: Iterable[Shape],
    contenders: Sequence[Implementation],
    settings: Settings,
    progress: Callable[[str], None] = lambda stage: None,
) -> Benchmark:
    """Every shape with everybody who is present."""
    clocks, timer = ClockReader(settings.device), Timer(settings.device)
    machine = _machine(settings.device, clocks)
    rows: list[Row] = []
    for shape in shapes:
        progress(str(shape))
        rows += _rows_of(shape, contenders, settings, timer, clocks)
    return Benchmark(
        machine=machine,
        conventions=CONVENTIONS,
        effort=settings.effort,
        flush_bytes=timing.FLUSH_BYTES,
        absent={one.name: one.absent for one in contenders if one.attend is None},
        rows=tuple(rows),
    )


def _rows_of(
    shape: Shape,
    contenders: Sequence[Implementation],
    settings: Settings,
    timer: Timer,
    clocks: ClockReader,
) -> Iterator[Row]:
    operands = Operands.random(shape, settings.device, settings.seed)
    judge = Judge(shape, operands, gradients="backward" in settings.directions)
    present = {one.name: one.attend for one in contenders if one.attend is not None}
    for direction in settings.directions:
        judged = {
            name: _judged(name, partial(_PREPARE[direction], attend, operands, shape.causal), judge)
            for name, attend in present.items()
        }
        right = {name: found.call for name, found in judged.items() if found.call is not None}
        for cache in settings.caches:
            times = timing.measure(right, cache, settings.effort, timer, clocks.note)
            for name, found in judged.items():
                yield Row(
                    implementation=name,
                    shape=shape,
                    direction=direction,
                    cache=cache,
                    status=found.status,
                    why=found.why,
                    errors=found.errors,
                    flops=shape.flops(direction),
                    seconds=times.get(name),
                    clocks=clocks.take(name),
                )


@dataclass(frozen=True)
class _Judged:
    """A call that may be timed, or why not."""

    status: Status
    why: str
    errors: dict[str, Deviation]
    call: Callable[[], object] | None


def _judged(name: str, prepare: Callable[[], Prepared], judge: Judge) -> _Judged:
    try:
        call, results = prepare()
    except Exception as broken:  # whatever a peer raises for what it cannot do
        expected = name != OURS or isinstance(broken, (HopperflashError, torch.OutOfMemoryError))
        first, *_ = str(broken).splitlines() or [""]
        status: Status = "refused" if expected else "failed"
        return _Judged(status, f"{type(broken).__name__}: {first}", {}, None)
    try:
        errors = judge.worst(results)
    except ValueError as unlike:
        return _Judged("WRONG", str(unlike), {}, None)
    wrong = [
        f"{result} is off by {one.max_error:.2e} ({one.max_bound:.2e} allowed), RMS"
        f" {one.rms_error:.2e} ({one.rms_bound:.2e}), {one.nonfinite_mismatches} not finite"
        for result, one in errors.items()
        if not one.ok
    ]
    if wrong:
        return _Judged("WRONG", "; ".join(wrong), errors, None)
    return _Judged("timed", "", errors, call)


def _forward(attend: Attend, operands: Operands, causal: bool) -> Prepared:
    q, k, v = (x.detach() for x in operands.leaves)

    def call() -> Tensor:
        return attend(q, k, v, causal)

    return call, {"O": call()}


def _backward(attend: Attend, operands: Operands, causal: bool) -> Prepared:
    """The backward alone: its forward ran before, and what that saved stays."""
    out = attend(*operands.leaves, causal)

    def call() -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, operands.leaves, operands.dout, retain_graph=True)

    return call, dict(zip(("dQ", "dK", "dV"), call(), strict=True))


_PREPARE = {"forward": _forward, "backward": _backward}


def _machine(device: str, clocks: ClockReader) -> Machine:
    on_gpu = device != "cpu"
    return Machine(
        device=device,
        name=torch.cuda.get_device_name() if on_gpu else f"{torch.get_num_threads()} CPU threads",
        host=platform.platform(),
        torch=torch.__version__,
        hopperflash=hopperflash.__version__,
        cuda=torch.version.cuda,
        libraries=dict(_versions(LIBRARIES)),
        started=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        clocks=clocks.absent,
    )


def _versions(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Of those that are installed."""
    for name in names:
        with suppress(metadata.PackageNotFoundError):
            yield name, metadata.version(name)
