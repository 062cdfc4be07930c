"""Bulk and tensor loads: bytes for shared memory of one or several CTAs, and their mbarriers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .memory import CLUSTER_SHIFT
from .ptx_ir import Instruction
from .tensor_map import TensorMap, load_box, scatter_to_shared

Bytes = NDArray[np.uint8]


class Target(NamedTuple):
    """Where a load writes and what it signals."""

    cta: Any
    address: int
    signalled: Any
    barrier: int


def targets(cta: Any, destination: int, barrier: int, mask: int | None) -> list[Target]:
    """The targets of a load, without and with a multicast mask of cluster ranks."""
    if mask is None:
        return [Target(*cta.resolve_shared(destination), *cta.resolve_shared(barrier))]
    local = (1 << CLUSTER_SHIFT) - 1
    return [
        Target(peer, destination & local, peer, barrier & local)
        for rank, peer in enumerate(cta.cluster)
        if mask >> rank & 1
    ]


class AsyncLoad:
    """A load between its issue and its landing."""

    def __init__(self, cta: Any, ins: Instruction, where: Sequence[Target], nbytes: int) -> None:
        self.cta, self.ins, self.targets, self.nbytes = cta, ins, where, nbytes

    def submit(self) -> None:
        """Queue it; its bytes may arrive at any time from now on."""
        for target in self.targets:
            target.cta.shared.check(target.address, target.address + self.nbytes)
            target.cta.may_write(target.address, self.nbytes, self.ins)
        signals = [t.signalled.mbarrier(t.barrier) for t in self.targets]
        machine = self.cta.machine
        machine.counters.tma_loads += 1
        machine.async_work.submit(self.land, signals)

    def land(self) -> None:
        data, read = self._fetch()
        self.cta.machine.counters.tma_load_bytes += read
        for target in self.targets:
            target.cta.proxy.async_write(target.address, self.nbytes)
            self._place(target, data)
            target.signalled.mbarrier(target.barrier).complete_tx(self.nbytes)

    def _fetch(self) -> tuple[Bytes, int]:
        """The bytes to place and how many of them came from global memory."""
        raise NotImplementedError

    def _place(self, target: Target, data: Bytes) -> None:
        target.cta.shared.bytes_at(target.address, self.nbytes)[:] = data


class TensorLoad(AsyncLoad):
    """cp.async.bulk.tensor from global to shared."""

    def __init__(
        self,
        cta: Any,
        ins: Instruction,
        where: Sequence[Target],
        tensor_map: TensorMap,
        coords: Sequence[int],
    ) -> None:
        super().__init__(cta, ins, where, tensor_map.box_bytes)
        self.map, self.coords = tensor_map, coords

    def _fetch(self) -> tuple[Bytes, int]:
        return load_box(self.map, self.coords, self.cta.machine.memory)

    def _place(self, target: Target, data: Bytes) -> None:
        shared = target.cta.shared
        scatter_to_shared(self.map, data, shared.data, target.address, shared.base)


class BulkLoad(AsyncLoad):
    """cp.async.bulk of consecutive bytes, from global memory or the CTA's own shared memory."""

    def __init__(
        self,
        cta: Any,
        ins: Instruction,
        where: Sequence[Target],
        source: int,
        nbytes: int,
        from_shared: bool,
    ) -> None:
        super().__init__(cta, ins, where, nbytes)
        self.source, self.from_shared = source, from_shared

    def _fetch(self) -> tuple[Bytes, int]:
        if self.from_shared:
            return self.cta.shared.bytes_at(self.source, self.nbytes).copy(), 0
        return self.cta.machine.memory.view(self.source, self.nbytes), self.nbytes
