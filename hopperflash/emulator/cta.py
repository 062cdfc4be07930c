"""State of one resident CTA: shared memory, barriers, queues; what the opcodes act on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .address_spaces import parts, space_of
from .barriers import ClusterBarrier, MBarrier, NamedBarrier
from .bulk_stores import BulkGroups
from .clocks import SyncPoint
from .codegen import param_offset
from .copy_groups import Copy, CopyGroups
from .decode import Op
from .errors import AddressError, BarrierError
from .global_order import adds_floats
from .memory import CLUSTER_SHIFT, LOCAL_BASE, SharedMemory, unsigned
from .ordering import NoOrdering, Ordering, is_strong
from .ptx_ir import Instruction, Symbol
from .register_rules import FenceState, RegisterPool
from .registers import RegisterFile
from .shadow import EXITED
from .tracker import Tracker
from .wgmma_queue import WgmmaQueue

Index3 = tuple[int, int, int]
Lanes = NDArray[np.int64]


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
        self.order = NoOrdering()
        self.fences = FenceState(self._unfenced)
        self.pool = RegisterPool(self, machine.registers_per_thread)
        self._mbarriers: dict[int, MBarrier] = {}
        self._barriers: dict[int, NamedBarrier] = {}
        self._implicit: set[int] = set()
        self._cluster_phase: dict[int, int] = {}
        self._wgmma: dict[int, WgmmaQueue] = {}
        self._bulk: dict[int, BulkGroups] = {}
        self._copies: dict[int, CopyGroups] = {}

    def track(self, tracker: Tracker) -> None:
        """From now on every access is checked; the rank in the cluster is known."""
        self.order = Ordering(tracker, self)

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

    def check_live(self, ins: Instruction, reached_from: Cta) -> None:
        """A CTA's shared memory is there while it runs."""
        if not self.live:
            self.machine.hazards.report(
                EXITED, ins, reached_from, f"the access reaches CTA {self.index}"
            )

    def check_shared_range(self, address: int, nbytes: int) -> None:
        place, at = self.resolve_shared(address)
        place.shared.check(at, at + nbytes)

    def tensor_map_bytes(self, address: int) -> bytes:
        raw: bytes = self.machine.memory.view(address, 128).tobytes()
        return raw

    # Generic loads and stores

    def load(
        self, space: str, addrs: Lanes, size: int, count: int, g: Any, lanes: Lanes | None,
        ins: Instruction,
    ) -> NDArray[Any]:  # fmt: skip
        """Values [count, lanes] of a state space; "" is generic."""
        mixed = parts(space, addrs)
        if mixed is not None:
            gathered = np.empty((count, len(addrs)), unsigned(size))
            for part, index in mixed:
                at = index if lanes is None else lanes[index]
                gathered[:, index] = self.load(part, addrs[index], size, count, g, at, ins)
            return gathered
        space = space or space_of(addrs)
        counters = self.machine.counters
        nbytes = len(addrs) * size * count
        if space == "shared":
            counters.shared_load_bytes += nbytes
            place, local = self.place_of(addrs, ins)
            values: NDArray[Any] = place.shared.load(local, size, count)
            self.order.access(place, local, size * count, g, lanes, ins, write=False)
            return values
        if space == "local":
            return self.local.load(self._local(addrs, g, lanes), size, count)
        counters.global_load_bytes += nbytes
        strong = is_strong(ins)
        self.machine.global_order.begin(self, ins, atomic=strong)
        values = self.machine.memory.load(addrs, size, count)
        if strong:
            self._flag(addrs, g, lanes, ins, read=True)
        return values

    def store(
        self, space: str, addrs: Lanes, values: NDArray[Any], g: Any, lanes: Lanes | None,
        ins: Instruction,
    ) -> None:  # fmt: skip
        """Store [count, lanes] into a state space; "" is generic."""
        mixed = parts(space, addrs)
        if mixed is not None:
            for part, index in mixed:
                at = index if lanes is None else lanes[index]
                self.store(part, addrs[index], values[:, index], g, at, ins)
            return
        space = space or space_of(addrs)
        counters = self.machine.counters
        if space == "shared":
            counters.shared_store_bytes += values.nbytes
            place, local = self.place_of(addrs, ins)
            place.shared.store(local, values)
            nbytes = values.itemsize * len(values)
            self.order.access(place, local, nbytes, g, lanes, ins, write=True)
        elif space == "local":
            self.local.store(self._local(addrs, g, lanes), values)
        else:
            counters.global_store_bytes += values.nbytes
            strong = is_strong(ins)
            self.machine.global_order.begin(self, ins, atomic=strong)
            self.machine.memory.store(addrs, values)
            if strong:
                self._flag(addrs, g, lanes, ins, write=True)

    def atomic(
        self, space: str, addrs: Lanes, size: int, update: Callable[[Any], Any], g: Any,
        lanes: Lanes, ins: Instruction,
    ) -> NDArray[Any]:  # fmt: skip
        """Read-modify-write of lanes at different addresses; the old values."""
        space = space or space_of(addrs)
        counters = self.machine.counters
        place, memory, local = self, self.machine.memory, addrs
        if space == "shared":
            place, local = self.place_of(addrs, ins)
            memory = place.shared
            counters.shared_load_bytes += len(addrs) * size
            counters.shared_store_bytes += len(addrs) * size
            self.order.access(place, local, size, g, lanes, ins, write=True)
        else:
            counters.global_atomic_bytes += len(addrs) * size
            self.machine.global_order.begin(self, ins, atomic=True)
            self._flag(addrs, g, lanes, ins, read=True, write=True)
        old: NDArray[Any] = memory.load(local, size, 1)[0]
        memory.store(local, update(old)[None, :])
        return old

    def _flag(
        self, addrs: Lanes, g: Any, lanes: Lanes | None, ins: Instruction, *,
        read: bool = False, write: bool = False,
    ) -> None:  # fmt: skip
        """A strong access to global memory."""
        order = self.machine.global_order
        order.flag(self, addrs, ins, read=read, write=write)
        if order.ordered and lanes is not None and adds_floats(ins):
            self.order.add(g, lanes, ins)
        elif order.ordered:
            self.order.flag(g, lanes, ins)

    def place_of(self, addrs: Lanes, ins: Instruction) -> tuple[Cta, Lanes]:
        """The CTA that the shared addresses of all lanes name, and its own addresses."""
        rank = int(addrs[0]) >> CLUSTER_SHIFT
        if rank == 0:
            return self, addrs
        place, _ = self.resolve_shared(int(addrs[0]))
        place.check_live(ins, self)
        return place, addrs & ((1 << CLUSTER_SHIFT) - 1)

    def _local(self, addrs: Lanes, g: Any, lanes: Lanes | None) -> Lanes:
        thread = (np.arange(g.n) if lanes is None else lanes) + g.lo
        offsets = np.where(addrs >= LOCAL_BASE, addrs - LOCAL_BASE, addrs)
        addresses: Lanes = thread * self.machine.program.local_bytes + offsets
        return addresses

    # Barriers

    def init_mbarrier(self, address: int, count: int, ins: Instruction) -> MBarrier:
        self.shared.check(address, address + 8)
        if address % 8 or not 0 < count < 1 << 20:
            raise BarrierError(f"mbarrier.init of {address:#x} with count {count}")
        if address in self._mbarriers:
            self.machine.hazards.report(
                "mbarrier initialised twice", ins, self,
                f"{self._mbarriers[address].describe()} was not invalidated",
            )  # fmt: skip
        barrier = self._mbarriers[address] = MBarrier(address, count)
        return barrier

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

    def mbarriers_in(self, lo: int, hi: int) -> list[MBarrier]:
        """The mbarriers that live in the bytes [lo, hi)."""
        return [b for at, b in self._mbarriers.items() if lo < at + 8 and at < hi]

    def fence_mbarriers(self, warps: set[int]) -> None:
        """The warps' initialisations so far reach the async proxy and other CTAs."""
        for barrier in self._mbarriers.values():
            if barrier.initialiser in warps:
                barrier.fenced = True

    def live_warps(self) -> int:
        return sum(1 for w in range(0, self.threads, 32) if self.live >> w & 0xFFFFFFFF)

    def arrive_at_barrier(
        self, g: Any, lanes: Lanes, number: int, count: int
    ) -> tuple[NamedBarrier, int, SyncPoint]:
        """bar arrival of the warps of these lanes; count 0 means all live threads.

        Returns the barrier, the generation of the arrival and what that generation makes known.
        """
        if not 0 <= number < 16 or count % 32:
            raise BarrierError(f"barrier {number} with {count} threads")
        barrier = self._barriers.setdefault(number, NamedBarrier(number))
        if count:
            self._implicit.discard(number)
        else:
            self._implicit.add(number)
            count = 32 * self.live_warps()
        warps = np.unique(lanes + g.lo >> 5).tolist()
        point = barrier.point
        self.order.release(g, lanes, point)
        return barrier, barrier.arrive(32 * len(warps), count, warps), point

    def arrive_at_cluster(self, g: Any, lanes: Lanes, relaxed: bool) -> None:
        release = self.order.release_inits if relaxed else self.order.release
        release(g, lanes, self.cluster_barrier.arrivals)
        for warp in np.unique(lanes + g.lo >> 5).tolist():
            threads = (self.live >> 32 * warp & 0xFFFFFFFF).bit_count()
            self._cluster_phase[warp] = self.cluster_barrier.phase
            self.cluster_barrier.arrive(threads)

    def cluster_phases(self, g: Any, lanes: Lanes) -> list[tuple[int, Lanes]]:
        """Lanes by the cluster phase that their warp arrived in, which it waits for once."""
        warps = lanes + g.lo >> 5
        arrived = {w: self._cluster_phase.pop(w, None) for w in np.unique(warps).tolist()}
        if None in arrived.values():
            raise BarrierError("barrier.cluster.wait of threads that have not arrived")
        phases = np.array([arrived[w] for w in warps.tolist()])
        return [(int(p), lanes[phases == p]) for p in np.unique(phases)]

    # Async queues

    def wgmma_queue(self, group: int) -> WgmmaQueue:
        queue = self._wgmma.get(group)
        if queue is None:
            queue = self._wgmma[group] = WgmmaQueue(self, group)
        return queue

    def in_flight(self, lo: int, hi: int) -> tuple[int, int]:
        """Accumulator and A operand rows in flight in the warpgroups of threads [lo, hi)."""
        rows = fragments = 0
        for group, queue in self._wgmma.items():
            if queue.in_flight and group * 128 < hi and lo < group * 128 + 128:
                rows |= queue.in_flight
                fragments |= queue.fragments
        return rows, fragments

    def _unfenced(self, op: Op, rows: int) -> None:
        names = [r.name for r, row in self.machine.program.row_of.items()
                 if r.bank == "u" and rows >> row & 1]  # fmt: skip
        self.machine.hazards.report(
            "missing wgmma.fence", op.ins, self,
            f"registers {', '.join(names[:3])}{', ...' if len(names) > 3 else ''} were accessed "
            "since the warpgroup's last wgmma.fence",
        )  # fmt: skip

    def bulk_groups(self, warp: int) -> BulkGroups:
        groups = self._bulk.get(warp)
        if groups is None:
            groups = self._bulk[warp] = BulkGroups(self, warp)
        return groups

    def copy_groups(self, warp: int) -> CopyGroups:
        groups = self._copies.get(warp)
        if groups is None:
            groups = self._copies[warp] = CopyGroups(self, warp)
        return groups

    def copy_async(
        self, g: Any, lanes: Lanes, to: Lanes, frm: Lanes, nbytes: int, sizes: Lanes | None,
        ins: Instruction,
    ) -> None:  # fmt: skip
        """cp.async of these lanes; `sizes` are the source bytes, the rest is zero."""
        by_warp = lanes + g.lo >> 5
        for warp in np.unique(by_warp).tolist():
            of_warp = by_warp == warp
            part = None if sizes is None else sizes[of_warp]
            copy = Copy(self, ins, to[of_warp], frm[of_warp], nbytes, part)
            self.copy_groups(warp).add(copy)

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
                    f"the CTA exits before shared memory {store.source:#x} is read",
                    who=f"warp {warp}",
                )  # fmt: skip
            for store in groups.remaining():
                store.read()
            self.machine.late_stores.extend(groups.remaining())
        for warp, copies in self._copies.items():
            for copy in copies.outstanding():
                hazards.report(
                    "cp.async never waited for", copy.ins, self,
                    "the CTA exits before it", who=f"warp {warp}",
                )  # fmt: skip
        for barrier in self._mbarriers.values():
            if barrier.tx:
                hazards.report(
                    "transaction counts do not balance", None, self,
                    f"the CTA exits, mbarrier {barrier.describe()}",
                )  # fmt: skip
        self.order.finish(list(self._mbarriers.values()))
        self.pool.finish()
