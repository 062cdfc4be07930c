"""cp.async: copies of one warp from global to shared memory, and their groups."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .barriers import MBarrier
from .ptx_ir import Instruction

Lanes = NDArray[np.int64]


class Copy:
    """cp.async of some lanes of a warp; `sizes` are their source bytes, the rest is zero."""

    def __init__(
        self, cta: Any, ins: Instruction, to: Lanes, frm: Lanes, nbytes: int, sizes: Lanes | None
    ) -> None:
        self.ins = ins
        self.place, self.to = cta.place_of(to, ins)
        self._cta, self._machine = cta, cta.machine
        self._frm, self.nbytes, self._sizes = frm, nbytes, sizes
        self._landed = False

    def land(self) -> None:
        if self._landed:
            return
        self._landed = True
        self._machine.global_order.begin(self._cta, self.ins)
        memory, nbytes, sizes = self._machine.memory, self.nbytes, self._sizes
        item = min(nbytes, 8)
        values = np.zeros((nbytes // item, len(self.to)), f"u{item}")
        whole = np.ones(len(self.to), bool) if sizes is None else sizes >= nbytes
        if whole.any():
            values[:, whole] = memory.load(self._frm[whole], item, nbytes // item)
        for lane in np.nonzero(~whole)[0]:
            size = 0 if sizes is None else int(sizes[lane])
            if size:
                raw = np.zeros(nbytes, np.uint8)
                raw[:size] = memory.view(int(self._frm[lane]), size)
                values[:, lane] = raw.view(f"u{item}")
        self.place.shared.store(self.to, values)
        valid = len(self.to) * nbytes if sizes is None else int(np.minimum(sizes, nbytes).sum())
        self._machine.counters.global_load_bytes += valid


class _Group(NamedTuple):
    clock: int
    copies: list[Copy]


class CopyGroups:
    """The cp.async groups of one warp."""

    def __init__(self, cta: Any, warp: int) -> None:
        self._cta, self._warp = cta, warp
        self._clock = 1
        self._open: list[Copy] = []
        self._groups: deque[_Group] = deque()

    def add(self, copy: Copy) -> None:
        self._cta.order.copy(copy.place, copy.to, copy.nbytes, self._warp, self._clock, copy.ins)
        self._open.append(copy)
        self._cta.machine.async_work.start(copy.land)

    def commit(self) -> None:
        self._groups.append(_Group(self._clock, self._open))
        self._open = []
        self._clock += 1

    def wait(self, newest: int) -> None:
        while len(self._groups) > newest:
            group = self._groups.popleft()
            for copy in group.copies:
                copy.land()
            self._cta.order.groups_done("copy", self._warp, group.clock)

    def wait_all(self) -> None:
        self.commit()
        self.wait(0)

    def arrive(self, barrier: MBarrier, counted: bool) -> None:
        """An mbarrier arrival that follows the lane's earlier cp.async."""
        if not counted:
            barrier.pending += 1
        earlier = self.outstanding()
        self._groups.clear()
        self._open = []
        point = self._cta.order.copies_arrive(self._warp, self._clock)
        self._clock += 1

        def land() -> None:
            for copy in earlier:
                copy.land()
            barrier.arrivals.join(point)
            barrier.arrive(1)

        self._cta.machine.async_work.submit(land, (barrier,))

    def outstanding(self) -> list[Copy]:
        return [c for group in self._groups for c in group.copies] + self._open
