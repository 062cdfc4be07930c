"""Who accessed memory when: one numbered record per access, looked up from the shadow memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .ptx_ir import Instruction

GENERIC = 1
"""Done by the generic proxy: the async proxy sees it after a fence.proxy.async only."""
ATOMIC = 2
"""Atomic or strong: does not race with its like."""
NARROW = 4
"""Less than the four bytes that the shadow memory tells apart."""

Ids = NDArray[np.int32]


class AccessLog:
    """Accesses of a cluster; number 0 stands for none and precedes everything."""

    def __init__(self) -> None:
        self.entity: NDArray[np.int32] = np.zeros(256, np.int32)
        self.clock: NDArray[np.int32] = np.zeros(256, np.int32)
        self.flags: NDArray[np.int8] = np.zeros(256, np.int8)
        self._instructions: list[Instruction | None] = [None]
        self._actors: list[Any] = [None]

    def add(
        self, entities: slice, clocks: Any, flags: int, ins: Instruction, actors: Sequence[Any]
    ) -> int:
        """Record an access of each of several entities; returns the first one's number."""
        first = len(self._actors)
        end = first + len(actors)
        while end > self.entity.size:
            self.entity = np.concatenate([self.entity, np.zeros_like(self.entity)])
            self.clock = np.concatenate([self.clock, np.zeros_like(self.clock)])
            self.flags = np.concatenate([self.flags, np.zeros_like(self.flags)])
        self.entity[first:end] = range(entities.start, entities.stop)
        self.clock[first:end] = clocks
        self.flags[first:end] = flags
        self._instructions.extend([ins] * len(actors))
        self._actors.extend(actors)
        return first

    def instruction(self, number: int) -> Instruction:
        ins = self._instructions[number]
        assert ins is not None
        return ins

    def actor(self, number: int) -> Any:
        return self._actors[number]
