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
    """Generic writes to shared memory that their warp has not fenced for the async proxy."""

    def __init__(self, cta: Any, nbytes: int) -> None:
        self._cta = cta
        self._writer: NDArray[np.int16] = np.zeros((nbytes >> GRANULE_SHIFT) + 1, np.int16)
        self._dirty_warps: set[int] = set()

    @property
    def clean(self) -> bool:
        return not self._dirty_warps

    def generic_write(self, addresses: NDArray[np.int64], warps: NDArray[np.int64]) -> None:
        self._writer[(addresses - SHARED_BASE) >> GRANULE_SHIFT] = warps + 1
        self._dirty_warps.update(np.unique(warps).tolist())

    def fence(self, warps: Iterable[int]) -> None:
        for warp in warps:
            if warp in self._dirty_warps:
                self._writer[self._writer == warp + 1] = 0
                self._dirty_warps.discard(warp)

    def async_read(self, addresses: NDArray[np.int64], ins: Instruction) -> None:
        """Addresses that the async proxy will read; one per granule is enough."""
        if not self._dirty_warps:
            return
        writers = self._writer[(addresses - SHARED_BASE) >> GRANULE_SHIFT]
        found = writers[writers > 0]
        if found.size:
            at = int(addresses[writers > 0][0])
            self._cta.machine.hazards.report(
                "missing fence.proxy.async", ins, self._cta,
                f"reads shared {at:#x}, which warp {int(found[0]) - 1} wrote without a proxy fence",
            )  # fmt: skip

    def async_write(self, lo: int, nbytes: int) -> None:
        if self._dirty_warps:
            first = (lo - SHARED_BASE) >> GRANULE_SHIFT
            self._writer[first : first + (nbytes >> GRANULE_SHIFT)] = 0


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
