"""A CTA's part in the happens-before detector; without hazard checks it does nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .access_log import ATOMIC, GENERIC, NARROW
from .barriers import MBarrier
from .clocks import SyncPoint
from .ptx_ir import Instruction
from .shadow import Actor, Shadow
from .tracker import Tracker

Lanes = NDArray[np.int64]

_UNSYNCED = "with no synchronisation between"
_STRONG = {"atom", "red"}
_STRONG_PARTS = {"volatile", "relaxed", "acquire", "release", "mmio"}


def is_strong(ins: Instruction) -> bool:
    """Is the access atomic or ordered, so that it does not race with its like?"""
    return ins.parts[0] in _STRONG or not _STRONG_PARTS.isdisjoint(ins.parts)


class NoOrdering:
    """Keeps no record: `hazards="basic"`."""

    def release(self, g: Any, lanes: Lanes | None, point: SyncPoint) -> None:
        """The warps of these lanes (None: all) leave what they know at a barrier."""

    def release_warp(self, warp: int, point: SyncPoint) -> None:
        """As `release` for one warp of the CTA."""

    def acquire(self, g: Any, lanes: Lanes | None, point: SyncPoint) -> None:
        """The warps of these lanes come to know what was left at a barrier."""

    def acquire_warps(self, warps: slice, point: SyncPoint) -> None:
        """As `acquire` for warps of the CTA."""

    def fence(self, g: Any, lanes: Lanes | None) -> None:
        """fence.proxy.async for shared memory."""

    def fence_global(self, g: Any, lanes: Lanes | None) -> None:
        """fence.proxy.async for global memory."""

    def init_mbarrier(self, barrier: MBarrier) -> None:
        """A warp, its initialiser, initialised an mbarrier."""

    def fence_inits(self, g: Any, lanes: Lanes | None) -> None:
        """fence.mbarrier_init: relaxed arrivals too hand on the warps' initialisations so far."""

    def release_inits(self, g: Any, lanes: Lanes | None, point: SyncPoint) -> None:
        """A relaxed arrival: hands on what fence.mbarrier_init released."""

    def use_mbarrier(
        self, g: Any, lanes: Lanes | None, barrier: MBarrier, ins: Instruction
    ) -> None:
        """Lanes arrive at, wait for or hand out an mbarrier."""

    def access(
        self, place: Any, addresses: Lanes, nbytes: int, g: Any, lanes: Lanes | None,
        ins: Instruction, *, write: bool,
    ) -> None:  # fmt: skip
        """Lanes read or write shared memory of `place`, `nbytes` each."""

    def bulk_load(self, place: Any, barrier: MBarrier, span: slice, warp: int, ins: Instruction,
                  source: int | None) -> None:  # fmt: skip
        """A bulk load was issued to the addresses of `span`, from shared `source` or global."""

    def remote_store(self, place: Any, barrier: MBarrier, span: slice, warp: int,
                     ins: Instruction, reduces: bool) -> None:  # fmt: skip
        """st.async or red.async of one lane was issued; the mbarrier is told when it lands."""

    def bulk_store(self, span: slice, warp: int, clock: int, ins: Instruction) -> None:
        """A bulk store of a warp was issued as part of its group `clock`."""

    def copy(self, place: Any, addresses: Lanes, nbytes: int, warp: int, clock: int,
             ins: Instruction) -> None:  # fmt: skip
        """cp.async of a warp's lanes as part of its group `clock`."""

    def groups_done(self, kind: str, warp: int, clock: int) -> None:
        """The warp waited for its "bulk" or "copy" groups up to `clock`."""

    def copies_arrive(self, warp: int, clock: int) -> SyncPoint:
        """What an arrival after the warp's cp.async up to `clock` makes known."""
        return SyncPoint()

    def wgmma(
        self, group: int, clock: int, ins: Instruction, a: list[Lanes], b: Lanes, every: Lanes
    ) -> None:
        """A warpgroup issued a wgmma as part of its group `clock`; see `Shadow.wgmma_read`."""

    def wgmma_done(self, group: int, clock: int) -> None:
        """The warpgroup waited for its wgmma groups up to `clock`."""

    def flag(self, g: Any, lanes: Lanes | None, ins: Instruction) -> None:
        """A strong access to global memory, which may take or pass a turn."""

    def add(self, g: Any, lanes: Lanes, ins: Instruction) -> None:
        """Lanes add floating-point numbers in global memory."""

    def finish(self, barriers: list[MBarrier]) -> None:
        """The CTA is done."""


class Ordering(NoOrdering):
    """Feeds the clocks and the shadow memory."""

    def __init__(self, tracker: Tracker, cta: Any) -> None:
        self._tracker = tracker
        self._cta = cta
        self._clocks = tracker.clocks
        self._first = cta.rank * ((cta.threads + 31) // 32)
        self.shadow = Shadow(tracker, cta, cta.shared.size)
        self._turn: tuple[int, int, Instruction] | None = None
        """Who acquired last in global memory, when and where."""
        self._added: dict[int, int] = {}
        """When each warp last added there."""
        self._added_in_bulk: dict[int, int] = {}
        """When each warp last waited for bulk additions; before that, when it issued one."""
        self._fenced_global: dict[int, NDArray[np.int32]] = {}
        """What each warp knew at its last proxy fence for global memory."""

    def _rows(self, g: Any, lanes: Lanes | None) -> Any:
        if lanes is None or g.first_warp == g.last_warp:
            return slice(self._first + g.first_warp, self._first + g.last_warp + 1)
        return np.unique((lanes + g.lo) >> 5) + self._first

    def _actor(self, kind: str, key: Any, clock: int, warp: int, ins: Instruction) -> Actor:
        row = self._first + warp
        entity = self._tracker.entity(kind, key)
        return Actor(entity, clock, self._tracker.warp_name(row), row, ins)

    # Barriers

    def release(self, g: Any, lanes: Lanes | None, point: SyncPoint) -> None:
        point.join(self._clocks.release(self._rows(g, lanes)))

    def release_warp(self, warp: int, point: SyncPoint) -> None:
        row = self._first + warp
        point.join(self._clocks.release(slice(row, row + 1)))

    def acquire(self, g: Any, lanes: Lanes | None, point: SyncPoint) -> None:
        self._clocks.acquire(self._rows(g, lanes), point)

    def acquire_warps(self, warps: slice, point: SyncPoint) -> None:
        rows = slice(self._first + warps.start, self._first + warps.stop)
        self._clocks.acquire(rows, point)

    def fence(self, g: Any, lanes: Lanes | None) -> None:
        self._clocks.fence(self._rows(g, lanes))

    def fence_global(self, g: Any, lanes: Lanes | None) -> None:
        for row in np.arange(self._clocks.warps)[self._rows(g, lanes)].tolist():
            self._fenced_global[row] = self._clocks.known[row].copy()
            self._clocks.release(slice(row, row + 1))

    def init_mbarrier(self, barrier: MBarrier) -> None:
        row = self._first + barrier.initialiser
        barrier.origin = (row, self._clocks.now(row))

    def fence_inits(self, g: Any, lanes: Lanes | None) -> None:
        for row in np.arange(self._clocks.warps)[self._rows(g, lanes)].tolist():
            own = slice(row, row + 1)
            self._clocks.reach(own, self._tracker.entity("init", row), self._clocks.now(row))
            # What it initialises from now on is not covered.
            self._clocks.release(own)

    def release_inits(self, g: Any, lanes: Lanes | None, point: SyncPoint) -> None:
        known = self._clocks.knowledge(self._rows(g, lanes)).known
        entities = self._tracker.entities("init")
        if entities:
            released = np.zeros_like(known)
            released[entities] = known[entities]
            point.join(SyncPoint(released))

    def use_mbarrier(
        self, g: Any, lanes: Lanes | None, barrier: MBarrier, ins: Instruction
    ) -> None:
        row, clock = barrier.origin
        rows = self._rows(g, lanes)
        fenced = self._tracker.entity("init", row)
        known = self._clocks.known[rows][:, (row, fenced)].max(axis=1)
        if (known < clock).any():
            index = np.arange(self._clocks.warps)[rows]
            self._tracker.hazards.report(
                "mbarrier used before its initialisation is ordered", ins, self._cta,
                f"{barrier.describe()} was initialised by {self._tracker.warp_name(row)}",
                who=self._tracker.warp_name(int(index[known < clock][0])),
            )  # fmt: skip

    # Memory

    def access(
        self, place: Any, addresses: Lanes, nbytes: int, g: Any, lanes: Lanes | None,
        ins: Instruction, *, write: bool,
    ) -> None:  # fmt: skip
        if g.first_warp == g.last_warp:
            warps = np.array([self._first + g.first_warp])
        else:
            warps = (np.arange(g.n) if lanes is None else lanes) + g.lo
            warps = (warps >> 5) + self._first
        flags = 0
        if is_strong(ins):
            flags |= ATOMIC
        if nbytes < 4:
            flags |= NARROW
        place.order.shadow.generic(addresses, nbytes, warps, ins, write=write, flags=flags)

    def bulk_load(
        self, place: Any, barrier: MBarrier, span: slice, warp: int, ins: Instruction,
        source: int | None,
    ) -> None:  # fmt: skip
        actor = self._loader(barrier, warp, ins)
        name = actor.name
        if not barrier.fenced and self._tracker.once(barrier):
            self._tracker.hazards.report(
                "mbarrier signalled by the async proxy with no fence after its initialisation",
                ins, self._cta, barrier.describe(), who=name,
            )  # fmt: skip
        if source is not None:
            self.shadow.async_read(source, span.stop - span.start, actor)
        place.order.shadow.async_write(span.start, span.stop - span.start, actor)

    def _loader(self, barrier: MBarrier, warp: int, ins: Instruction) -> Actor:
        """Work that completes with the mbarrier's current phase."""
        if barrier.entity < 0:
            barrier.entity = self._tracker.entity("mbarrier", id(barrier))
            self._tracker.keep.append(barrier)
        barrier.last_load = clock = barrier.phase + 1
        row = self._first + warp
        return Actor(barrier.entity, clock, self._tracker.warp_name(row), row, ins)

    def remote_store(self, place: Any, barrier: MBarrier, span: slice, warp: int,
                     ins: Instruction, reduces: bool) -> None:  # fmt: skip
        actor = self._loader(barrier, warp, ins)
        flags = GENERIC | ATOMIC if reduces else GENERIC
        at = np.array([span.start], np.int64)
        place.order.shadow.copy_write(at, span.stop - span.start, actor, flags)

    def bulk_store(self, span: slice, warp: int, clock: int, ins: Instruction) -> None:
        actor = self._actor("bulk", self._first + warp, clock, warp, ins)
        self.shadow.async_read(span.start, span.stop - span.start, actor)
        if self._cta.machine.global_order.ordered and ins.parts[1] == "reduce":
            self._add_in_bulk(self._first + warp, ins)

    def copy(
        self, place: Any, addresses: Lanes, nbytes: int, warp: int, clock: int, ins: Instruction
    ) -> None:
        actor = self._actor("copy", self._first + warp, clock, warp, ins)
        place.order.shadow.copy_write(addresses, nbytes, actor, GENERIC)

    def groups_done(self, kind: str, warp: int, clock: int) -> None:
        row = self._first + warp
        own = slice(row, row + 1)
        self._clocks.reach(own, self._tracker.entity(kind, row), clock)
        if kind == "bulk" and row in self._added_in_bulk:
            self._added_in_bulk[row] = self._clocks.now(row)
            self._clocks.release(own)

    def copies_arrive(self, warp: int, clock: int) -> SyncPoint:
        row = self._first + warp
        point = self._clocks.release(slice(row, row + 1))
        point.reach(self._tracker.entity("copy", row), clock)
        return point

    def wgmma(
        self, group: int, clock: int, ins: Instruction, a: list[Lanes], b: Lanes, every: Lanes
    ) -> None:
        first = self._first + 4 * group
        actor = Actor(
            self._tracker.entity("wgmma", first), clock,
            f"the warpgroup of {self._tracker.warp_name(first)}", first, ins,
        )  # fmt: skip
        self.shadow.wgmma_read(a, b, every, actor, slice(first, first + 4))

    def wgmma_done(self, group: int, clock: int) -> None:
        first = self._first + 4 * group
        entity = self._tracker.entity("wgmma", first)
        self._clocks.reach(slice(first, first + 4), entity, clock)

    # The order of sums in global memory, within the CTA

    def flag(self, g: Any, lanes: Lanes | None, ins: Instruction) -> None:
        rows = np.arange(self._clocks.warps)[self._rows(g, lanes)].tolist()
        if not {"release", "acq_rel"}.isdisjoint(ins.parts):
            known = self._clocks.known[rows].max(axis=0)
            late = [row for row, clock in self._added.items() if known[row] < clock]
            if late:
                name = self._tracker.warp_name(late[0])
                self._unordered(ins, f"{name} added before it, {_UNSYNCED}", rows[0])
            if any(
                self._fenced(rows[0], row) < clock for row, clock in self._added_in_bulk.items()
            ):
                self._unordered(ins, "bulk additions came before it, with no proxy fence", rows[0])
        if not {"acquire", "acq_rel"}.isdisjoint(ins.parts):
            self._turn = (rows[0], self._clocks.now(rows[0]), ins)
        # What follows is not part of what was passed or taken.
        self._clocks.release(self._rows(g, lanes))

    def add(self, g: Any, lanes: Lanes, ins: Instruction) -> None:
        for row in np.arange(self._clocks.warps)[self._rows(g, lanes)].tolist():
            self._added[row] = self._clocks.now(row)
            if self._turn is not None and self._clocks.known[row, self._turn[0]] < self._turn[1]:
                taken = self._tracker.warp_name(self._turn[0])
                self._unordered(
                    ins, f"{taken} acquired a turn before it, {_UNSYNCED}", row, self._turn[2]
                )

    def _add_in_bulk(self, row: int, ins: Instruction) -> None:
        self._added_in_bulk[row] = self._clocks.now(row)
        if self._turn is None:
            return
        taken, clock, other = self._turn
        name = self._tracker.warp_name(taken)
        if self._clocks.known[row, taken] < clock:
            self._unordered(ins, f"{name} acquired a turn before it, {_UNSYNCED}", row, other)
        elif self._fenced(row, taken) < clock:
            self._unordered(
                ins, f"{name} acquired a turn before it, with no proxy fence", row, other
            )

    def _fenced(self, row: int, other: int) -> int:
        """How far a warp knew another when it last fenced global memory."""
        known = self._fenced_global.get(row)
        return 0 if known is None else int(known[other])

    def _unordered(
        self, ins: Instruction, detail: str, row: int, other: Instruction | None = None
    ) -> None:
        self._tracker.hazards.report(
            "floating-point additions in no fixed order", ins, self._cta,
            detail, who=self._tracker.warp_name(row),
            other=other,
        )  # fmt: skip

    def finish(self, barriers: list[MBarrier]) -> None:
        if len(self._cta.cluster) > 1:
            warps = (self._cta.threads + 31) // 32
            self.shadow.leave(slice(self._first, self._first + warps))
        known = self._clocks.known[:, : self._clocks.entities].max(axis=0)
        for barrier in barriers:
            if barrier.entity >= 0 and known[barrier.entity] < barrier.last_load:
                self._tracker.hazards.report(
                    "bulk load never waited for", None, self._cta,
                    f"mbarrier {barrier.describe()}",
                )  # fmt: skip
