"""Bulk and tensor loads: bytes for shared memory of one or several CTAs, and their mbarriers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .errors import AddressError
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

    alignment = 16
    pattern = 1
    """Bytes after which the swizzle repeats."""
    shared_source: int | None = None
    is_bulk = True

    def __init__(self, cta: Any, ins: Instruction, where: Sequence[Target], nbytes: int) -> None:
        self.cta, self.ins, self.targets, self.nbytes = cta, ins, where, nbytes

    def submit(self, warp: int) -> None:
        """Queue it; its bytes may arrive at any time from now on."""
        signals = []
        for target in self.targets:
            span = slice(target.address, target.address + self.nbytes)
            self._check_target(target, span, warp)
            barrier = target.signalled.mbarrier(target.barrier)
            self._order(target, barrier, span, warp)
            signals.append(barrier)
        self._phases = [(barrier, barrier.phase) for barrier in signals]
        machine = self.cta.machine
        machine.counters.tma_loads += self.is_bulk
        machine.async_work.submit(self.land, signals)

    def _order(self, target: Target, barrier: Any, span: slice, warp: int) -> None:
        self.cta.order.bulk_load(target.cta, barrier, span, warp, self.ins, self.shared_source)

    def _check_target(self, target: Target, span: slice, warp: int) -> None:
        target.cta.shared.check(span.start, span.stop)
        if span.start % self.alignment:
            raise AddressError(
                f"bulk load to shared {span.start:#x}, which is not {self.alignment}-byte aligned"
            )
        if span.start % self.pattern:
            self._report(
                "swizzle pattern misaligned", warp,
                f"shared {span.start:#x} is no multiple of the {self.pattern}-byte pattern",
            )  # fmt: skip
        for barrier in target.cta.mbarriers_in(span.start, span.stop):
            self._report("bulk load overwrites an mbarrier", warp, barrier.describe())
        for peer in (target.cta, target.signalled):
            peer.check_live(self.ins, self.cta)

    def _report(self, kind: str, warp: int, detail: str) -> None:
        self.cta.machine.hazards.report(kind, self.ins, self.cta, detail, who=f"warp {warp}")

    def land(self) -> None:
        self.cta.machine.global_order.begin(self.cta, self.ins)
        data, read = self._fetch()
        self.cta.machine.counters.tma_load_bytes += read
        for target, (barrier, phase) in zip(self.targets, self._phases, strict=True):
            self._place(target, data)
            if barrier.phase != phase:
                self.cta.machine.hazards.report(
                    "transaction counts do not balance", self.ins, self.cta,
                    f"phase {phase} completed before the load that it counts: "
                    f"mbarrier {barrier.describe()}",
                )  # fmt: skip
            barrier.complete_tx(self.nbytes)

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
        self.alignment = 128
        self.pattern = max(8 * tensor_map.swizzle, 1)

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
        self.shared_source = source if from_shared else None

    def _fetch(self) -> tuple[Bytes, int]:
        if self.from_shared:
            return self.cta.shared.bytes_at(self.source, self.nbytes).copy(), 0
        memory = self.cta.machine.memory
        memory.touch_box(self.source, (self.nbytes,), (1,), 1, False)
        return memory.view(self.source, self.nbytes), self.nbytes
