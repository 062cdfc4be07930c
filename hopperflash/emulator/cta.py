"""State of one resident CTA: shared memory, barriers, queues; what the opcodes act on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .barriers import ClusterBarrier, MBarrier, NamedBarrier
from .bulk_stores import BulkGroups
from .codegen import param_offset
from .errors import AddressError, BarrierError
from .hazards import ProxyTracker, ReadTracker
from .memory import CLUSTER_SHIFT, LOCAL_BASE, SHARED_LIMIT, SharedMemory
from .operands import one_lane_per_warp
from .ptx_ir import Instruction, Symbol
from .registers import RegisterFile
from .wgmma_queue import WgmmaQueue

Index3 = tuple[int, int, int]
Lanes = NDArray[np.int64]
Copy = Callable[[], None]


class Cta:
    """A CTA of a cluster while it is resident."""

    def __init__(self, machine: Any, serial: int, index: Index3, registers: RegisterFile) -> None:
        launch, program = machine.launch, machine.program
        self.machine = machine
        self.serial = serial
        self.index = index
        self.block: Index3 = launch.block
        self.grid: Index3 = launch.grid
        self.cluster_dims: Index3 = launch.cluster
        self.cluster_index: Index3 = tuple(
            i % c for i, c in zip(index, launch.cluster, strict=True)
        )
        cx, cy, _ = launch.cluster
        x, y, z = self.cluster_index
        self.rank = x + cx * (y + cy * z)
        self.cluster: list[Cta] = []
        self.cluster_barrier = ClusterBarrier(0)
        self.threads = int(np.prod(launch.block))
        self.live = (1 << self.threads) - 1
        self.dynamic_shared = launch.shared_bytes
        self.shared = SharedMemory(program.shared_static + launch.shared_bytes)
        self.local = SharedMemory(program.local_bytes * self.threads, 0)
        self.registers = registers
        self.proxy = ProxyTracker(self, self.shared.size)
        self.reads = ReadTracker(self)
        self._mbarriers: dict[int, MBarrier] = {}
        self._barriers: dict[int, NamedBarrier] = {}
        self._implicit: set[int] = set()
        self._cluster_phase: dict[int, int] = {}
        self._wgmma: dict[int, WgmmaQueue] = {}
        self._bulk: dict[int, BulkGroups] = {}
        self._copies: dict[int, deque[list[Copy]]] = {}
        self._open_copies: dict[int, list[Copy]] = {}

    # Addresses

    def symbol_address(self, symbol: Symbol) -> int:
        """The address of a variable or parameter."""
        program = self.machine.program
        if symbol.name in program.symbols:
            return int(program.symbols[symbol.name]) + symbol.offset
        return int(self.machine.param_base) + param_offset(program.kernel, symbol)

    def param_bytes(self, symbol: Symbol, nbytes: int) -> bytes:
        offset = param_offset(self.machine.program.kernel, symbol)
        raw: bytes = self.machine.param_buffer[offset : offset + nbytes].tobytes()
        return raw

    def resolve_shared(self, address: int) -> tuple[Cta, int]:
        """The CTA and its own address of a shared::cluster address."""
        rank = address >> CLUSTER_SHIFT
        if rank == 0:
            return self, address
        if rank > len(self.cluster):
            raise AddressError(f"shared address {address:#x} names CTA {rank - 1} of the cluster")
        return self.cluster[rank - 1], address & ((1 << CLUSTER_SHIFT) - 1)

    def check_shared_range(self, address: int, nbytes: int) -> None:
        place, at = self.resolve_shared(address)
        place.shared.check(at, at + nbytes)

    def tensor_map_bytes(self, address: int) -> bytes:
        raw: bytes = self.machine.memory.view(address, 128).tobytes()
        return raw

    # Generic loads and stores

    def load(
        self, space: str, addrs: Lanes, size: int, count: int, g: Any, lanes: Lanes | None
    ) -> NDArray[Any]:
        """Values [count, lanes] of a state space; "" is generic."""
        space = space or _space_of(addrs)
        counters = self.machine.counters
        nbytes = len(addrs) * size * count
        if space == "shared":
            counters.shared_load_bytes += nbytes
            place, local = self._place(addrs)
            return place.shared.load(local, size, count)
        if space == "local":
            return self.local.load(self._local(addrs, g, lanes), size, count)
        counters.global_load_bytes += nbytes
        values: NDArray[Any] = self.machine.memory.load(addrs, size, count)
        return values

    def store(
        self, space: str, addrs: Lanes, values: NDArray[Any], g: Any, lanes: Lanes | None
    ) -> None:
        """Store [count, lanes] into a state space; "" is generic."""
        space = space or _space_of(addrs)
        counters = self.machine.counters
        if space == "shared":
            counters.shared_store_bytes += values.nbytes
            place, local = self._place(addrs)
            place.shared.store(local, values)
            warps = (np.arange(g.n) if lanes is None else lanes) + g.lo >> 5
            place.proxy.generic_write(local, warps)
            if place.reads.pending:
                end = int(local.max()) + values.itemsize * len(values)
                place.reads.write(int(local.min()), end, local, None)
        elif space == "local":
            self.local.store(self._local(addrs, g, lanes), values)
        else:
            counters.global_store_bytes += values.nbytes
            self.machine.memory.store(addrs, values)

    def _place(self, addrs: Lanes) -> tuple[Cta, Lanes]:
        rank = int(addrs[0]) >> CLUSTER_SHIFT
        if rank == 0:
            return self, addrs
        place, _ = self.resolve_shared(int(addrs[0]))
        return place, addrs & ((1 << CLUSTER_SHIFT) - 1)

    def _local(self, addrs: Lanes, g: Any, lanes: Lanes | None) -> Lanes:
        thread = (np.arange(g.n) if lanes is None else lanes) + g.lo
        offsets = np.where(addrs >= LOCAL_BASE, addrs - LOCAL_BASE, addrs)
        addresses: Lanes = thread * self.machine.program.local_bytes + offsets
        return addresses

    def may_write(self, address: int, nbytes: int, ins: Instruction) -> None:
        """From now on the async proxy may write these shared bytes."""
        if self.reads.pending:
            self.reads.write(address, address + nbytes, None, ins)

    # Barriers

    def init_mbarrier(self, address: int, count: int) -> None:
        self.shared.check(address, address + 8)
        if address % 8 or not 0 < count < 1 << 20:
            raise BarrierError(f"mbarrier.init of {address:#x} with count {count}")
        self._mbarriers[address] = MBarrier(address, count)

    def drop_mbarrier(self, address: int) -> None:
        self._mbarriers.pop(address, None)

    def mbarrier(self, address: int) -> MBarrier:
        """The barrier at a shared (or shared::cluster) address."""
        if address >> CLUSTER_SHIFT:
            place, local = self.resolve_shared(address)
            return place.mbarrier(local)
        barrier = self._mbarriers.get(address)
        if barrier is None:
            raise BarrierError(f"mbarrier at {address:#x} was not initialised")
        return barrier

    def release(self, g: Any, m: Any) -> None:
        """The warps of these lanes make their earlier writes known."""
        if not self.proxy.clean:
            self.proxy.release(warp for warp, _ in one_lane_per_warp(m, g))

    def live_warps(self) -> int:
        return sum(1 for w in range(0, self.threads, 32) if self.live >> w & 0xFFFFFFFF)

    def arrive_at_barrier(
        self, g: Any, lanes: Lanes, number: int, count: int
    ) -> tuple[NamedBarrier, int]:
        """bar arrival of the warps of these lanes; count 0 means all live threads."""
        if not 0 <= number < 16 or count % 32:
            raise BarrierError(f"barrier {number} with {count} threads")
        barrier = self._barriers.setdefault(number, NamedBarrier(number))
        if count:
            self._implicit.discard(number)
        else:
            self._implicit.add(number)
            count = 32 * self.live_warps()
        warps = np.unique(lanes + g.lo >> 5).tolist()
        self.proxy.release(warps)
        return barrier, barrier.arrive(32 * len(warps), count, warps)

    def arrive_at_cluster(self, g: Any, lanes: Lanes) -> None:
        for warp in np.unique(lanes + g.lo >> 5).tolist():
            threads = (self.live >> 32 * warp & 0xFFFFFFFF).bit_count()
            self.proxy.release([warp])
            self._cluster_phase[warp] = self.cluster_barrier.phase
            self.cluster_barrier.arrive(threads)

    def cluster_phases(self, g: Any, lanes: Lanes) -> list[tuple[int, Lanes]]:
        """Lanes by the cluster phase that their warp arrived in."""
        warps = lanes + g.lo >> 5
        phases = np.array([self._cluster_phase.get(int(w), -1) for w in warps])
        return [(int(p), lanes[phases == p]) for p in np.unique(phases)]

    # Async queues

    def wgmma_queue(self, group: int) -> WgmmaQueue:
        queue = self._wgmma.get(group)
        if queue is None:
            queue = self._wgmma[group] = WgmmaQueue(self, group)
        return queue

    def in_flight(self, lo: int, hi: int) -> int:
        """Accumulator rows in flight in the warpgroups of threads [lo, hi)."""
        rows = 0
        for group, queue in self._wgmma.items():
            if queue.in_flight and group * 128 < hi and lo < group * 128 + 128:
                rows |= queue.in_flight
        return rows

    def bulk_groups(self, warp: int) -> BulkGroups:
        groups = self._bulk.get(warp)
        if groups is None:
            groups = self._bulk[warp] = BulkGroups(self.machine)
        return groups

    def copy_async(
        self, g: Any, lanes: Lanes, to: Lanes, frm: Lanes, nbytes: int, sizes: Lanes | None
    ) -> None:
        """cp.async of these lanes; `sizes` are the source bytes, the rest is zero."""
        by_warp = lanes + g.lo >> 5
        for warp in np.unique(by_warp).tolist():
            of_warp = by_warp == warp
            part = None if sizes is None else sizes[of_warp]
            copy = self._copy(to[of_warp], frm[of_warp], nbytes, part)
            if self.machine.async_work.at_issue():
                copy()
            else:
                self._open_copies.setdefault(warp, []).append(copy)

    def _copy(self, to: Lanes, frm: Lanes, nbytes: int, sizes: Lanes | None) -> Copy:
        item = min(nbytes, 8)

        def copy() -> None:
            values = np.zeros((nbytes // item, len(to)), f"u{item}")
            whole = np.ones(len(to), bool) if sizes is None else sizes >= nbytes
            if whole.any():
                values[:, whole] = self.machine.memory.load(frm[whole], item, nbytes // item)
            for lane in np.nonzero(~whole)[0]:
                size = 0 if sizes is None else int(sizes[lane])
                if size:
                    raw = np.zeros(nbytes, np.uint8)
                    raw[:size] = self.machine.memory.view(int(frm[lane]), size)
                    values[:, lane] = raw.view(f"u{item}")
            place, local = self._place(to)
            place.shared.store(local, values)
            valid = len(to) * nbytes if sizes is None else int(np.minimum(sizes, nbytes).sum())
            self.machine.counters.global_load_bytes += valid

        return copy

    def commit_copies(self, warp: int) -> None:
        self._copies.setdefault(warp, deque()).append(self._open_copies.pop(warp, []))

    def wait_copies(self, warp: int, newest: int) -> None:
        groups = self._copies.get(warp, deque())
        while len(groups) > newest:
            for copy in groups.popleft():
                copy()

    def wait_all_copies(self, warp: int) -> None:
        self.commit_copies(warp)
        self.wait_copies(warp, 0)

    def arrive_after_copies(self, g: Any, lane: int, address: int, counted: bool) -> None:
        """An mbarrier arrival that follows the lane's earlier cp.async."""
        barrier = self.mbarrier(address)
        if not counted:
            barrier.pending += 1
        warp = lane + g.lo >> 5
        earlier = [c for group in self._copies.pop(warp, ()) for c in group]
        earlier += self._open_copies.pop(warp, [])

        def land() -> None:
            for copy in earlier:
                copy()
            barrier.arrive(1)

        self.machine.async_work.submit(land, (barrier,))

    # Exit

    def exit_threads(self, threads: int) -> None:
        """These threads are done; barriers no longer wait for them."""
        self.live &= ~threads
        self.cluster_barrier.leave(threads.bit_count())
        for number in self._implicit:
            barrier = self._barriers[number]
            if barrier.arrived:
                barrier.needed = 32 * self.live_warps()
                barrier.arrive(0, barrier.needed, [])

    def finish(self) -> None:
        """Report and complete what the CTA leaves outstanding."""
        hazards = self.machine.hazards
        for queue in self._wgmma.values():
            for op in queue.outstanding():
                hazards.report("wgmma never waited for", op.ins, self, "the CTA exits before it")
        for warp, groups in self._bulk.items():
            for store in groups.unread():
                hazards.report(
                    "bulk store never waited for", store.ins, self,
                    f"warp {warp} exits before shared memory {store.source:#x} is read",
                )  # fmt: skip
            for store in groups.remaining():
                store.read()
            self.machine.late_stores.extend(groups.remaining())


def _space_of(addrs: Lanes) -> str:
    first = int(addrs[0])
    if 0 <= first < SHARED_LIMIT:
        return "shared"
    return "local" if first >= LOCAL_BASE else "global"
