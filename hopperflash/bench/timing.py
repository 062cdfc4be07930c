"""Seconds of single calls: events on a GPU, the clock on a CPU; cold and warm, taking turns.

Whoever is timed takes turns with all others, so that a chip that grows hot slows everybody; each
turn begins with calls that are not counted, until the warm-up is over. Before a cold call a buffer
larger than the last level of cache is overwritten; before a warm one the same call ran.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch

CacheState = Literal["cold", "warm"]
CACHE_STATES: tuple[CacheState, ...] = get_args(CacheState)
FLUSH_BYTES = 256 << 20  # of H100 50 MiB of L2, of B200 126, of server CPUs up to 256 a socket
TURNS = 3
MOST_IN_FLIGHT = 64  # calls queued before the host waits

Call = Callable[[], object]


@dataclass(frozen=True)
class Effort:
    """How long each call is timed, and warmed up, in seconds over all turns."""

    timed: float
    warm_up: float
    least: int = 5


@dataclass(frozen=True)
class Spread:
    """Quantiles of the seconds of single calls."""

    samples: int
    low: float  # a tenth of the calls are faster
    median: float
    high: float  # a tenth are slower

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread:
        deciles = statistics.quantiles(seconds, n=10, method="inclusive")
        return cls(len(seconds), deciles[0], statistics.median(seconds), deciles[-1])


class Timer:
    """Times calls on one kind of device."""

    def __init__(self, device: str) -> None:
        self._on_gpu = device != "cpu"
        self._buffer = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device=device)

    def sample(self, call: Call, cache: CacheState, count: int) -> list[float]:
        """Seconds of `count` calls, one by one; whatever ran before them was the same call."""
        if self._on_gpu:
            return self._by_events(call, cache, count)
        found = []
        for _ in range(count):
            if cache == "cold":
                self._buffer.zero_()
            start = time.perf_counter()
            call()
            found.append(time.perf_counter() - start)
        return found

    def _by_events(self, call: Call, cache: CacheState, count: int) -> list[float]:
        """While the buffer is overwritten the host queues the call, so that none waits for it."""
        pairs = []
        for _ in range(count):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            self._buffer.zero_()
            if cache == "warm":
                call()
            start.record()
            call()
            end.record()
            pairs.append((start, end))
        torch.cuda.synchronize()
        return [1e-3 * start.elapsed_time(end) for start, end in pairs]


def measure(
    calls: Mapping[str, Call],
    cache: CacheState,
    effort: Effort,
    timer: Timer,
    after_turn: Callable[[str], None] = lambda name: None,
) -> dict[str, Spread]:
    """The spread of each call by name; `after_turn` is told whose turn is over, the device hot."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    least = -(-effort.least // TURNS)
    for _ in range(TURNS):
        for name, call in calls.items():
            each = _warm_up(call, cache, timer, effort.warm_up / TURNS)
            count = max(least, int(effort.timed / TURNS / each))
            while count > 0:
                found[name] += timer.sample(call, cache, min(count, MOST_IN_FLIGHT))
                count -= MOST_IN_FLIGHT
            after_turn(name)
    return {name: Spread.of(seconds) for name, seconds in found.items()}


def _warm_up(call: Call, cache: CacheState, timer: Timer, seconds: float) -> float:
    """Calls for so long, two at least; the seconds that one takes with all that goes with it."""
    timer.sample(call, cache, 1)
    begin, count = time.perf_counter(), 0
    while count == 0 or time.perf_counter() < begin + seconds:
        timer.sample(call, cache, 1)
        count += 1
    return max(1e-9, (time.perf_counter() - begin) / count)
