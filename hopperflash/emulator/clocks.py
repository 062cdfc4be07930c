"""Vector clocks of a cluster: what each warp knows of the progress of every entity.

Entities are the warps, and whatever completes on its own: mbarriers (phases), warpgroups (wgmma
groups), and per warp the bulk stores and cp.async groups. An access at clock t of entity e happened
before what a warp does now if the warp knows e to have reached t.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Clock = NDArray[np.int32]
Rows = Any
"""Warps of the cluster: a slice or an index array into the rows of `Clocks`."""

_NONE: Clock = np.zeros(0, np.int32)


def _joined(a: Clock, b: Clock) -> Clock:
    if a.size < b.size:
        a, b = b, a
    joined: Clock = a.copy()
    np.maximum(joined[: b.size], b, out=joined[: b.size])
    return joined


def _diagonal(known: Clock) -> Clock:
    """The own clock of each warp, a view."""
    warps, width = known.shape
    return known.reshape(-1)[:: width + 1][:warps]


class SyncPoint:
    """What arrivals leave behind and waits pick up."""

    __slots__ = ("fenced", "known")

    def __init__(self, known: Clock = _NONE, fenced: Clock = _NONE) -> None:
        self.known = known
        self.fenced = fenced

    def join(self, other: SyncPoint) -> None:
        self.known = _joined(self.known, other.known)
        self.fenced = _joined(self.fenced, other.fenced)

    def copy(self) -> SyncPoint:
        # Joins replace the arrays, so that sharing them is safe.
        return SyncPoint(self.known, self.fenced)

    def reach(self, entity: int, clock: int) -> None:
        """The entity is known to have come to `clock`."""
        self.known = _joined(self.known, np.zeros(entity + 1, np.int32))
        self.known[entity] = max(clock, int(self.known[entity]))


class Clocks:
    """`known[w, e]`: how far warp w knows entity e; entities 0..warps-1 are the warps.

    `fenced[w, e]`: how far e's generic writes are known to have passed a fence.proxy.async.
    """

    def __init__(self, warps: int) -> None:
        self.warps = warps
        self.entities = warps
        width = 3 * warps + 16
        self.known: Clock = np.zeros((warps, width), np.int32)
        self.fenced: Clock = np.zeros((warps, width), np.int32)
        self._diagonal = _diagonal(self.known)
        self._diagonal[:] = 1

    def new_entity(self) -> int:
        if self.entities == self.known.shape[1]:
            space = np.zeros_like(self.known)
            self.known = np.concatenate([self.known, space], axis=1)
            self.fenced = np.concatenate([self.fenced, space], axis=1)
            self._diagonal = _diagonal(self.known)
        self.entities += 1
        return self.entities - 1

    def now(self, warp: int) -> int:
        return int(self._diagonal[warp])

    def now_of(self, rows: Rows) -> Clock:
        """The own clocks of several warps."""
        now: Clock = self._diagonal[rows]
        return now

    def knowledge(self, rows: Rows) -> SyncPoint:
        """What the warps together know."""
        return SyncPoint(self.known[rows].max(axis=0), self.fenced[rows].max(axis=0))

    def release(self, rows: Rows) -> SyncPoint:
        """What the warps did until now; later accesses belong to their next clock."""
        point = self.knowledge(rows)
        self._diagonal[rows] += 1
        return point

    def acquire(self, rows: Rows, point: SyncPoint) -> None:
        for mine, theirs in ((self.known, point.known), (self.fenced, point.fenced)):
            if theirs.size:
                part = mine[rows, : theirs.size]
                mine[rows, : theirs.size] = np.maximum(part, theirs)

    def fence(self, rows: Rows) -> None:
        """fence.proxy.async: generic writes known to the warps reach the async proxy."""
        self.fenced[rows] = np.maximum(self.fenced[rows], self.known[rows])
        self._diagonal[rows] += 1

    def reach(self, rows: Rows, entity: int, clock: int) -> None:
        """The warps know that the entity came to `clock`."""
        self.known[rows, entity] = np.maximum(self.known[rows, entity], clock)
