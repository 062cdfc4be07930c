"""Bulk and tensor stores: shared memory is read, then global memory written, in two steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .element_types import STORAGE
from .errors import AddressError
from .ptx_ir import Instruction
from .tensor_map import TensorMap, combine, gather_from_shared, reduce_box, store_box

Bytes = NDArray[np.uint8]

_SIZE = {
    "f16": 2, "bf16": 2, "b32": 4, "u32": 4, "s32": 4, "f32": 4,
    "b64": 8, "u64": 8, "s64": 8, "f64": 8,
}  # fmt: skip


class AsyncStore:
    """A store whose two halves happen once each, as late as its schedule wants."""

    alignment = 16

    def __init__(self, cta: Any, warp: int, source: int, nbytes: int, ins: Instruction) -> None:
        self.cta, self.source, self.nbytes, self.ins = cta, source, nbytes, ins
        self._packed: Bytes | None = None
        self._written = False
        cta.check_shared_range(source, nbytes)
        if source % self.alignment:
            raise AddressError(
                f"bulk store from shared {source:#x}, which is not {self.alignment}-byte aligned"
            )
        groups = cta.bulk_groups(warp)
        self._warp, self._clock = warp, groups.clock
        cta.order.bulk_store(slice(source, source + nbytes), warp, groups.clock, ins)

    def read(self) -> None:
        if self._packed is None:
            self._packed = self._gather()

    def write(self) -> None:
        self.read()
        if not self._written:
            self._written = True
            assert self._packed is not None
            reduces = self.ins.parts[1] == "reduce"
            self.cta.machine.global_order.begin(
                self.cta, self.ins, atomic=reduces, warp=self._warp, clock=self._clock
            )
            stored = self._scatter(self._packed)
            counters = self.cta.machine.counters
            counters.tma_store_bytes += stored
            if reduces:
                counters.tma_reduce_bytes += stored

    def _gather(self) -> Bytes:
        raise NotImplementedError

    def _scatter(self, packed: Bytes) -> int:
        raise NotImplementedError


class TensorStore(AsyncStore):
    """cp.async.bulk.tensor and cp.reduce.async.bulk.tensor from shared to global."""

    alignment = 128

    def __init__(
        self,
        cta: Any,
        warp: int,
        source: int,
        ins: Instruction,
        tensor_map: TensorMap,
        coords: Sequence[int],
        operation: str | None,
    ) -> None:
        super().__init__(cta, warp, source, tensor_map.box_bytes, ins)
        self.map, self.coords, self.operation = tensor_map, coords, operation

    def _gather(self) -> Bytes:
        shared = self.cta.shared
        return gather_from_shared(self.map, shared.data, self.source, shared.base)

    def _scatter(self, packed: Bytes) -> int:
        memory = self.cta.machine.memory
        if self.operation is None:
            return store_box(self.map, self.coords, packed, memory)
        return reduce_box(self.map, self.coords, packed, memory, self.operation)


class BulkStore(AsyncStore):
    """cp.async.bulk and cp.reduce.async.bulk of consecutive bytes from shared to global."""

    def __init__(
        self,
        cta: Any,
        warp: int,
        source: int,
        ins: Instruction,
        target: int,
        nbytes: int,
        operation: str | None,
        kind: str | None,
    ) -> None:
        super().__init__(cta, warp, source, nbytes, ins)
        self.target, self.operation, self.kind = target, operation, kind
        cta.machine.memory.check(target, target + nbytes, True)

    def _gather(self) -> Bytes:
        data: Bytes = self.cta.shared.bytes_at(self.source, self.nbytes).copy()
        return data

    def _scatter(self, packed: Bytes) -> int:
        memory = self.cta.machine.memory
        view = memory.view(self.target, self.nbytes, True)
        memory.touch_box(self.target, (self.nbytes,), (1,), 1, True)
        if self.operation is None or self.kind is None:
            view[:] = packed
        else:
            raw = STORAGE[_SIZE[self.kind]]
            combined = combine(view.view(raw), packed.view(raw), self.kind, self.operation)
            view[:] = combined.view(np.uint8)
        return self.nbytes


class _Group(NamedTuple):
    clock: int
    stores: list[AsyncStore]


class BulkGroups:
    """The bulk async groups of one warp."""

    def __init__(self, cta: Any, warp: int) -> None:
        self._cta, self._warp = cta, warp
        self._open: list[AsyncStore] = []
        self._groups: deque[_Group] = deque()
        self._read = 0
        self.clock = 1
        """The number of the open group."""

    def add(self, store: AsyncStore) -> None:
        self._open.append(store)
        work = self._cta.machine.async_work
        work.start(store.read)
        work.start(store.write)

    def commit(self) -> None:
        self._groups.append(_Group(self.clock, self._open))
        self._open = []
        self.clock += 1

    def wait(self, newest: int, reads_only: bool) -> None:
        """All but the `newest` groups have read (or also written) when this returns."""
        for group in list(self._groups)[: max(0, len(self._groups) - newest)]:
            for store in group.stores:
                if reads_only:
                    store.read()
                else:
                    store.write()
            self._read = max(self._read, group.clock)
            if not reads_only:
                self._groups.popleft()
                self._cta.machine.global_order.stored(self._cta, self._warp, group.clock)
        self._cta.order.groups_done("bulk", self._warp, self._read)

    def unread(self) -> list[AsyncStore]:
        """Stores whose source was not waited for."""
        late = [s for group in self._groups if group.clock > self._read for s in group.stores]
        return late + self._open

    def remaining(self) -> list[AsyncStore]:
        return [*(s for group in self._groups for s in group.stores), *self._open]
