"""Rule checks that wrong bytes alone may not show; each report is made once per PTX line."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .memory import SHARED_BASE
from .ptx_ir import Instruction

GRANULE_SHIFT = 4


class HazardLog:
    """Appends to the caller's list, once per kind and line."""

    def __init__(self, messages: list[str]) -> None:
        self.messages = messages
        self._seen: set[tuple[str, int]] = set()

    def report(self, kind: str, ins: Instruction, cta: Any, detail: str) -> None:
        key = (kind, ins.line)
        if key in self._seen:
            return
        self._seen.add(key)
        self.messages.append(f"{kind}: {detail}; {ins.where}; CTA {cta.index}")


class ProxyTracker:
    """Generic writes to shared memory on their way to the async proxy.

    A write is first unfenced (its warp + 1), after the warp's fence.proxy.async only unreleased
    (negative), and clean (0) once the warp has arrived at any barrier after the fence.
    """

    def __init__(self, cta: Any, nbytes: int) -> None:
        self._cta = cta
        self._state: NDArray[np.int16] = np.zeros((nbytes >> GRANULE_SHIFT) + 1, np.int16)
        self._unfenced: set[int] = set()
        self._unreleased: set[int] = set()

    @property
    def clean(self) -> bool:
        return not self._unfenced and not self._unreleased

    def generic_write(self, addresses: NDArray[np.int64], warps: NDArray[np.int64]) -> None:
        self._state[(addresses - SHARED_BASE) >> GRANULE_SHIFT] = warps + 1
        # Lanes start at the lowest warp and end at the highest.
        self._unfenced.update(range(int(warps[0]), int(warps[-1]) + 1))

    def fence(self, warps: Iterable[int]) -> None:
        for warp in warps:
            if warp in self._unfenced:
                self._state[self._state == warp + 1] = -(warp + 1)
                self._unfenced.discard(warp)
                self._unreleased.add(warp)

    def release(self, warps: Iterable[int]) -> None:
        """The warps arrived at a barrier."""
        if not self._unreleased:
            return
        for warp in warps:
            if warp in self._unreleased:
                self._state[self._state == -(warp + 1)] = 0
                self._unreleased.discard(warp)

    def async_read(
        self, addresses: NDArray[np.int64], ins: Instruction, reader: int | None = None
    ) -> None:
        """Addresses that the async proxy will read, one per granule is enough.

        `reader` is the warp that issued the read, None for a whole warpgroup.
        """
        if self.clean:
            return
        states = self._state[(addresses - SHARED_BASE) >> GRANULE_SHIFT]
        own = 0 if reader is None else -(reader + 1)
        bad = (states > 0) | ((states < 0) & (states != own))
        if not bad.any():
            return
        at, state = int(addresses[bad][0]), int(states[bad][0])
        kind = "missing fence.proxy.async" if state > 0 else "missing barrier"
        lacks = "a proxy fence" if state > 0 else "arriving at a barrier after its proxy fence"
        self._cta.machine.hazards.report(
            kind, ins, self._cta,
            f"reads shared {at:#x}, which warp {abs(state) - 1} wrote without {lacks}",
        )  # fmt: skip

    def async_write(self, lo: int, nbytes: int) -> None:
        if not self.clean:
            first = (lo - SHARED_BASE) >> GRANULE_SHIFT
            self._state[first : first + (nbytes >> GRANULE_SHIFT)] = 0


class PendingRead:
    """Shared bytes that queued async work has still to read."""

    __slots__ = ("addresses", "hi", "ins", "lo")

    def __init__(self, ins: Instruction, addresses: NDArray[np.int64]) -> None:
        self.ins = ins
        self.addresses = addresses
        self.lo, self.hi = int(addresses.min()), int(addresses.max()) + (1 << GRANULE_SHIFT)


class ReadTracker:
    """Queued reads of a CTA's shared memory, checked against writes that come too early."""

    def __init__(self, cta: Any) -> None:
        self._cta = cta
        self.pending: list[PendingRead] = []

    def write(self, lo: int, hi: int, addresses: NDArray[np.int64] | None, ins: Any) -> None:
        """A write of [lo, hi), or of the granules of `addresses` in it."""
        for read in self.pending:
            if read.hi <= lo or hi <= read.lo:
                continue
            if addresses is None:
                hit = ((read.addresses >= lo - 15) & (read.addresses < hi)).any()
            else:
                hit = np.isin(addresses >> GRANULE_SHIFT, read.addresses >> GRANULE_SHIFT).any()
            if hit:
                self._cta.machine.hazards.report(
                    "shared memory overwritten too early", read.ins, self._cta,
                    f"[{lo:#x}, {hi:#x}) is written"
                    + (f" by PTX line {ins.line}" if ins is not None else "")
                    + " before queued async work has read it",
                )  # fmt: skip
