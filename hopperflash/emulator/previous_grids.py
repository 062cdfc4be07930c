"""Programmatic dependent launch: what a kernel may not touch before it has waited.

A launch with that attribute starts while the one before it runs. Until `griddepcontrol.wait` it may
neither read what that one writes nor write what it reads or writes. The emulator runs one launch
after the other, so it is told by the bytes that the earlier ones have touched. A CTA counts as
having waited from its first warp's wait on.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .hazards import HazardLog
from .ptx_ir import Instruction
from .traffic import TouchedBytes


class PreviousGrids:
    """The launches that may still be running when the next one starts."""

    def __init__(self) -> None:
        self._touched: list[tuple[TouchedBytes, TouchedBytes]] = []
        self._waited: set[int] = set()

    @property
    def watches(self) -> bool:
        """Whether there is any."""
        return bool(self._touched)

    def start(self, programmatic: bool) -> None:
        """A launch begins; without the attribute all before it have ended."""
        self._waited.clear()
        if not programmatic:
            self._touched.clear()

    def end(self, loaded: TouchedBytes, stored: TouchedBytes) -> None:
        """The launch is over, and the next may have started within it."""
        self._touched.append((loaded, stored))

    def wait(self, cta: Any) -> None:
        """`griddepcontrol.wait` of one of the CTA's warps."""
        self._waited.add(cta.serial)

    def check(
        self,
        addresses: NDArray[np.int64],
        itemsize: int,
        write: bool,
        at: tuple[Any, Instruction, HazardLog],
    ) -> None:
        """Reports items that an earlier launch may still use."""
        cta, ins, log = at
        if cta.serial in self._waited:
            return
        for loaded, stored in self._touched:
            if stored.meets(addresses, itemsize) or (write and loaded.meets(addresses, itemsize)):
                verb = "written" if write else "read"
                detail = "an earlier launch may still use it"
                log.report(f"global memory {verb} before griddepcontrol.wait", ins, cta, detail)
                return
