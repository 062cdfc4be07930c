"""What each warp of a CTA does, in its own order, as the emulator executes a kernel.

The events are those of the race detector, which sees every copy, product, barrier and addition; a
trace knows a kernel's roles and rings from what it does and not from its source.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np

from hopperflash.emulator.cta import Cta
from hopperflash.emulator.memory import SHARED_BASE
from hopperflash.emulator.ordering import Ordering
from hopperflash.emulator.scheduler import ClusterScheduler
from hopperflash.emulator.swizzle import GRANULE
from hopperflash.emulator.wgmma import WgmmaShape

WARPS_PER_WARPGROUP = 4


@dataclass(frozen=True)
class Work:
    """Instructions of a warp between two other events."""

    instructions: int
    mufu: int


@dataclass(frozen=True)
class Load:
    """A bulk load into shared memory, counted by an mbarrier.

    A multicast one fills the memory of `ctas`, each of which does the same for the others.
    """

    address: int
    nbytes: int
    barrier: int
    ctas: int = 1


@dataclass(frozen=True)
class Store:
    """A bulk store or addition from shared memory."""

    address: int
    nbytes: int
    adds: bool


@dataclass(frozen=True)
class AwaitStores:
    """The warp's own bulk stores."""


@dataclass(frozen=True)
class Add:
    """Additions to global memory from registers."""

    nbytes: int


@dataclass(frozen=True)
class Wait:
    """For a phase of an mbarrier."""

    barrier: int


@dataclass(frozen=True)
class Arrive:
    """At an mbarrier, of this CTA or of another in the cluster, which `count` arrivals complete."""

    barrier: int
    count: int


@dataclass(frozen=True)
class Meet:
    """At a named barrier of so many warps; one that only arrives goes on at once."""

    barrier: int
    warps: int
    waits: bool = True


@dataclass(frozen=True)
class Multiply:
    """A wgmma of the warp's warpgroup; `a` is None from registers, `group` its commit group."""

    a: int | None
    b: int
    columns: int
    group: int


@dataclass(frozen=True)
class Await:
    """The warpgroup's wgmma groups up to `group`."""

    group: int


Event = Work | Load | Store | AwaitStores | Add | Wait | Arrive | Meet | Multiply | Await


@dataclass
class Trace:
    """The events of the warps of one CTA; addresses count from the start of shared memory."""

    events: dict[int, list[Event]] = field(default_factory=lambda: defaultdict(list))

    def add(self, warp: int, event: Event) -> None:
        """Repeated waits, of which the first was a look, are one; so are neighbours' counts."""
        own = self.events[warp]
        last = own[-1] if own else None
        if isinstance(event, Work) and isinstance(last, Work):
            own[-1] = Work(last.instructions + event.instructions, last.mufu + event.mufu)
        elif isinstance(event, Add) and isinstance(last, Add):
            own[-1] = Add(last.nbytes + event.nbytes)
        elif not (isinstance(event, Wait) and self._waited(own) == event):
            own.append(event)

    @staticmethod
    def _waited(events: list[Event]) -> Event | None:
        """The last event but for work."""
        return next((one for one in reversed(events) if not isinstance(one, Work)), None)


class _Recorder(Ordering):
    """The race detector, which also writes a trace."""

    def __init__(self, tracker: Any, cta: Any, trace: Trace) -> None:
        super().__init__(tracker, cta)
        self.trace = trace

    def _add(self, g: Any, lanes: Any, event: Event) -> None:
        for row in np.arange(self._clocks.warps)[self._rows(g, lanes)].tolist():
            self.trace.add(row - self._first, event)

    def use_mbarrier(self, g: Any, lanes: Any, barrier: Any, ins: Any) -> None:
        super().use_mbarrier(g, lanes, barrier, ins)
        at = barrier.address - SHARED_BASE
        waits = "try_wait" in ins.parts or "test_wait" in ins.parts
        self._add(g, lanes, Wait(at) if waits else Arrive(at, barrier.expected))

    def bulk_load(
        self, place: Any, barrier: Any, span: slice, warp: int, ins: Any, source: Any
    ) -> None:
        super().bulk_load(place, barrier, span, warp, ins, source)
        if place is self._cta:
            at, nbytes = span.start - SHARED_BASE, span.stop - span.start
            ctas = len(self._cta.cluster) if "multicast::cluster" in ins.opcode else 1
            self.trace.add(warp, Load(at, nbytes, barrier.address - SHARED_BASE, ctas))

    def bulk_store(self, span: slice, warp: int, clock: int, ins: Any) -> None:
        super().bulk_store(span, warp, clock, ins)
        nbytes, adds = span.stop - span.start, ins.parts[1] == "reduce"
        self.trace.add(warp, Store(span.start - SHARED_BASE, nbytes, adds))

    def groups_done(self, kind: str, warp: int, clock: int) -> None:
        super().groups_done(kind, warp, clock)
        if kind == "bulk":
            self.trace.add(warp, AwaitStores())

    def add(self, g: Any, lanes: Any, ins: Any) -> None:
        super().add(g, lanes, ins)
        # One float of each lane: vectors come element by element.
        self._add(g, lanes, Add(4 * 32))

    def wgmma(self, group: int, clock: int, ins: Any, a: Any, b: Any, every: Any) -> None:
        super().wgmma(group, clock, ins, a, b, every)
        event = Multiply(
            a=int(min(rows.min() for rows in a)) * GRANULE if len(a) else None,
            b=int(b.min()) * GRANULE,
            columns=WgmmaShape.parse(ins.opcode).n,
            group=clock,
        )
        for warp in range(WARPS_PER_WARPGROUP):
            self.trace.add(WARPS_PER_WARPGROUP * group + warp, event)

    def wgmma_done(self, group: int, clock: int) -> None:
        super().wgmma_done(group, clock)
        for warp in range(WARPS_PER_WARPGROUP):
            self.trace.add(WARPS_PER_WARPGROUP * group + warp, Await(clock))


@contextmanager
def traced(kernel: str) -> Iterator[Trace]:
    """Inside, the first CTA of each launch of a kernel with this name in its own is traced.

    Meant for a single launch that `hazards` checks in full; additions are seen by "ordered".
    """
    trace = Trace()
    run, meet = ClusterScheduler._run, Cta.arrive_at_barrier
    waits = [True]  # the instruction that is being executed, if it is a named barrier's

    def is_traced(cta: Any) -> bool:
        return cta.index == (0, 0, 0) and kernel in cta.machine.launch.kernel.name

    def track(cta: Any, tracker: Any) -> None:
        known = is_traced(cta)
        cta.order = _Recorder(tracker, cta, trace) if known else Ordering(tracker, cta)

    def run_segment(scheduler: Any, fragment: Any) -> None:
        if is_traced(fragment.cta):
            segment, threads = scheduler.program.segments[fragment.at], fragment.threads
            work = Work(segment.instructions, segment.mufu)
            for warp in range(threads.bit_length() + 31 >> 5):
                if threads >> 32 * warp & 0xFFFFFFFF:
                    trace.add(warp, work)
            waits[0] = not any("arrive" in op.ins.parts for op in segment.ops)
        run(scheduler, fragment)

    def arrive(cta: Any, g: Any, lanes: Any, number: int, count: int) -> Any:
        # Barrier 0, of all threads, is __syncthreads of the set-up.
        if is_traced(cta) and number:
            for warp in np.unique(lanes + g.lo >> 5).tolist():
                trace.add(warp, Meet(number, count // 32, waits[0]))
        return meet(cta, g, lanes, number, count)

    with (
        patch.object(Cta, "track", track),
        patch.object(ClusterScheduler, "_run", run_segment),
        patch.object(Cta, "arrive_at_barrier", arrive),
    ):
        yield trace
