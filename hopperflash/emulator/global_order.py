"""Races on global memory between clusters of a launch, and with their own bulk stores.

Coarser than the detector of shared memory: a cluster is one entity, so that its own threads are
taken as ordered. Flags in global memory order clusters: a release there (or a strong access behind
a fence) and an acquire of the same address (or a strong access with a fence).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .hazards import HazardLog
from .previous_grids import PreviousGrids
from .ptx_ir import Instruction
from .traffic import box_offsets

Known = dict[Any, int]
_FLOATS = {"f16", "bf16", "f16x2", "bf16x2", "f32", "f64", "tensor"}


class Entity(NamedTuple):
    """A cluster; or the bulk stores of one of its warps, where `warp` names it."""

    cluster: int
    warp: str = ""


class _Access(NamedTuple):
    entity: Entity
    clock: int
    atomic: bool
    ins: Instruction
    cta: Any


@dataclass
class _Cluster:
    clock: int = 1
    known: Known = field(default_factory=dict)
    fence: Known | None = None
    """What was known at the latest fence."""
    seen: dict[int, Known] = field(default_factory=dict)
    """What flags that were read with no acquire would make known, each once."""


class NoGlobalOrder:
    """Keeps no record."""

    watches = False
    ordered = False

    def begin(self, cta: Any, ins: Instruction, *, atomic: bool = False, warp: int | None = None,
              clock: int = 0) -> None:  # fmt: skip
        """The accesses that follow are this CTA's; as bulk stores of `warp` where one is given."""

    def items(
        self, start: int, end: int, index: NDArray[np.int64], itemsize: int, write: bool,
        changed: NDArray[np.bool_] | None = None,
    ) -> None:  # fmt: skip
        """Items of the region [start, end), counted from its start, are accessed.

        `changed` tells which items a write gives another value: writing the same value twice is
        let pass.
        """

    def box(self, start: int, end: int, offset: int, shape: Sequence[int],
            strides: Sequence[int], itemsize: int, write: bool) -> None:  # fmt: skip
        """A box of items at a byte offset of a region is accessed."""

    def flag(self, cta: Any, addresses: NDArray[np.int64], ins: Instruction,
             *, read: bool, write: bool) -> None:  # fmt: skip
        """A strong access, which may order clusters."""

    def wait(self, cta: Any) -> None:
        """griddepcontrol.wait."""

    def fence(self, cta: Any) -> None:
        """fence.acq_rel, fence.sc or membar."""

    def stored(self, cta: Any, warp: int, clock: int) -> None:
        """The warp's bulk stores up to `clock` are done."""


class GlobalOrder(NoGlobalOrder):
    """The record of one launch."""

    watches = True

    def __init__(
        self,
        hazards: HazardLog,
        previous: PreviousGrids | None = None,
        ordered: bool = False,
    ) -> None:
        """`ordered` asks that something fixes the order of floating-point additions as well."""
        self._hazards = hazards
        self._previous = PreviousGrids() if previous is None else previous
        self.ordered = ordered
        self._clusters: dict[int, _Cluster] = {}
        # Never changed but replaced: addresses with the same history share one.
        self._flags: dict[int, Known] = {}
        self._shadow: dict[tuple[int, int], tuple[NDArray[np.int32], NDArray[np.int32]]] = {}
        self._accesses: list[_Access | None] = [None]
        self._now: _Access | None = None
        self._number = 0

    def _state(self, cta: Any) -> _Cluster:
        return self._clusters.setdefault(cta.cluster[0].serial, _Cluster())

    # Accesses

    def begin(self, cta: Any, ins: Instruction, *, atomic: bool = False, warp: int | None = None,
              clock: int = 0) -> None:  # fmt: skip
        entity = Entity(cta.cluster[0].serial)
        if warp is None:
            clock = self._state(cta).clock
        else:
            entity = Entity(entity.cluster, f"{cta.rank}:{warp}")
        self._now = _Access(entity, clock, atomic, ins, cta)
        self._number = 0

    def _record(self) -> int:
        if not self._number:
            self._number = len(self._accesses)
            self._accesses.append(self._now)
        return self._number

    def _of(self, start: int, end: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """The last write and the last read of every four bytes of a region."""
        shadow = self._shadow.get((start, end))
        if shadow is None:
            words = (end - start + 15) // 16 * 4
            shadow = np.zeros(words, np.int32), np.zeros(words, np.int32)
            self._shadow[start, end] = shadow
        return shadow

    def items(
        self, start: int, end: int, index: NDArray[np.int64], itemsize: int, write: bool,
        changed: NDArray[np.bool_] | None = None,
    ) -> None:  # fmt: skip
        self._check_previous(start + index * itemsize, itemsize, write)
        writes, reads = self._of(start, end)
        words = index * itemsize >> 2
        if itemsize == 8:
            words = np.concatenate([words, words + 1])
            changed = None if changed is None else np.concatenate([changed, changed])
        before = writes[words]
        if changed is not None:
            before = np.where(changed, before, 0)
        self._check(before, "overwritten" if write else "read", "write")
        if write:
            self._check(reads[words], "overwritten", "read")
        (writes if write else reads)[words] = self._record()

    def box(self, start: int, end: int, offset: int, shape: Sequence[int],
            strides: Sequence[int], itemsize: int, write: bool) -> None:  # fmt: skip
        inner = shape[-1] * itemsize
        if self._previous.watches:
            self._check_previous(start + box_offsets(offset, shape, strides), itemsize, write)
        if strides[-1] != itemsize or any(n % 4 for n in (inner, offset, *strides[:-1])):
            # Not made of whole words: every item by itself.
            self.items(start, end, box_offsets(offset, shape, strides), 1, write)
            return
        views = [
            np.ndarray((*shape[:-1], inner // 4), np.int32, buffer=part, offset=offset,
                       strides=(*strides[:-1], 4))
            for part in self._of(start, end)
        ]  # fmt: skip
        writes, reads = views
        self._check(writes, "overwritten" if write else "read", "write")
        if write:
            self._check(reads, "overwritten", "read")
        (writes if write else reads)[...] = self._record()

    def _check_previous(self, addresses: NDArray[np.int64], itemsize: int, write: bool) -> None:
        if self._previous.watches and self._now is not None:
            at = (self._now.cta, self._now.ins, self._hazards)
            self._previous.check(addresses.reshape(-1), itemsize, write, at)

    def _check(self, numbers: NDArray[np.int32], verb: str, earlier: str) -> None:
        now = self._now
        if now is None or not numbers.any():
            return
        known = self._state(now.cta).known
        for number in np.unique(numbers).tolist():
            before = self._accesses[number]
            if before is None or before.entity == Entity(now.entity.cluster):
                continue
            if before.entity == now.entity or known.get(before.entity, 0) >= before.clock:
                continue
            kind = f"global memory {verb} with no synchronisation after its {earlier}"
            if before.atomic and now.atomic:
                if not self.ordered or not (adds_floats(before.ins) and adds_floats(now.ins)):
                    continue
                kind = "floating-point additions in no fixed order"
            self._hazards.report(
                kind, now.ins, now.cta, f"by CTA {before.cta.index}", other=before.ins
            )

    # Order

    def wait(self, cta: Any) -> None:
        self._previous.wait(cta)

    def _publish(self, cta: Any, state: _Cluster) -> Known:
        snapshot = {**state.known, Entity(cta.cluster[0].serial): state.clock}
        state.clock += 1
        return snapshot

    def flag(self, cta: Any, addresses: NDArray[np.int64], ins: Instruction,
             *, read: bool, write: bool) -> None:  # fmt: skip
        state = self._state(cta)
        both = "acq_rel" in ins.parts
        releases, acquires = both or "release" in ins.parts, both or "acquire" in ins.parts
        # By the identity of what was left before, which is kept so that no other gets it.
        joined: dict[int, tuple[Known, Known]] = {}
        for address in np.unique(addresses).tolist():
            left = self._flags.get(address)
            if read and left is not None:
                # A relaxed read acquires at the next fence, not by one before it.
                if acquires:
                    _join(state.known, left)
                else:
                    state.seen[id(left)] = left
            if write and (releases or state.fence is not None):
                point = self._publish(cta, state) if releases else state.fence
                assert point is not None
                if left is not None and left is not point:
                    if releases or id(left) not in joined:
                        joined[id(left)] = left, _union(left, point)
                    point = joined[id(left)][1]
                self._flags[address] = point

    def fence(self, cta: Any) -> None:
        state = self._state(cta)
        for left in state.seen.values():
            _join(state.known, left)
        state.seen.clear()
        state.fence = self._publish(cta, state)

    def stored(self, cta: Any, warp: int, clock: int) -> None:
        entity = Entity(cta.cluster[0].serial, f"{cta.rank}:{warp}")
        _join(self._state(cta).known, {entity: clock})


def adds_floats(ins: Instruction) -> bool:
    # A tensor copy does not name its type.
    return "add" in ins.parts and not _FLOATS.isdisjoint(ins.parts)


def _join(known: Known, other: Known) -> None:
    for entity, clock in other.items():
        if known.get(entity, 0) < clock:
            known[entity] = clock


def _union(one: Known, other: Known) -> Known:
    union = {**one}
    _join(union, other)
    return union
