"""Runs a kernel launch: CTAs in order, one cluster resident until it needs another."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from .async_work import AsyncWork
from .barriers import ClusterBarrier
from .bulk_stores import AsyncStore
from .codegen import Program, program_of
from .counters import Counters
from .cta import Cta, Index3
from .errors import EmulationError
from .global_order import GlobalOrder, NoGlobalOrder
from .hazards import HazardLog
from .limits import check_launch
from .memory import GlobalMemory
from .previous_grids import PreviousGrids
from .ptx_ir import Kernel
from .register_rules import registers_at_entry
from .registers import RegisterFile
from .scheduler import ClusterScheduler
from .tracker import Tracker

_MAX_RESIDENT_CLUSTERS = 132
# Rounds in which every resident cluster only polls, before another one is admitted.
_POLL_ROUNDS = 16
CHECKS = ("full", "basic", "ordered")
"""All hazards; those that cost no record of every access; all, and that sums are reproducible."""
# Unique across launches: register views cache values per CTA.
_serials = itertools.count()


# Which CTAs to execute: all, about so many, or those that a callable takes.
Selection = int | Callable[[Index3], bool] | None


@dataclass
class Launch:
    """A kernel launch as the driver sees it."""

    kernel: Kernel
    grid: Index3
    block: Index3
    cluster: Index3
    shared_bytes: int
    params: list[bytes]
    ctas: Selection = None
    previous: PreviousGrids | None = None
    """Launches that may still be running."""


def run_kernel(
    launch: Launch,
    memory: GlobalMemory,
    *,
    schedule: str,
    seed: int,
    counters: Counters,
    hazards: list[str],
    checks: str = "full",
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Execute a launch; global memory and `counters` are updated, rule breaks go to `hazards`."""
    machine = Machine(
        launch, memory, schedule, seed, counters, HazardLog(hazards, launch.kernel.name)
    )
    if checks not in CHECKS:
        raise ValueError(f"hazards {checks!r} is not one of {', '.join(CHECKS)}")
    machine.full_checks = checks != "basic"
    if machine.full_checks:
        ordered = checks == "ordered"
        machine.global_order = memory.order = GlobalOrder(machine.hazards, launch.previous, ordered)
    try:
        with np.errstate(all="ignore"):
            machine.run(progress)
    finally:
        machine.hazards.close()
        memory.order = NoGlobalOrder()


class Machine:
    """What all CTAs of a launch share."""

    def __init__(
        self,
        launch: Launch,
        memory: GlobalMemory,
        schedule: str,
        seed: int,
        counters: Counters,
        hazards: HazardLog,
    ) -> None:
        self.launch = launch
        self.memory = memory
        self.counters = counters
        self.hazards = hazards
        self.full_checks = True
        self.global_order = NoGlobalOrder()
        self.program: Program = program_of(launch.kernel)
        self.async_work = AsyncWork(schedule, seed)
        self.late_stores: list[AsyncStore] = []
        self._clock = 0
        self._threads = int(np.prod(launch.block))
        # Register files and their views are kept for later launches.
        self._files = self.program.register_files.setdefault(self._threads, [])
        self.registers_per_thread = registers_at_entry(launch.kernel, self._threads)
        self._check_launch()
        self.param_buffer = self._pack_params()
        self.param_base = int(self.param_buffer.ctypes.data)
        memory.forget_touched()
        memory.add(self.param_base, len(self.param_buffer), "kernel parameters")
        for name, array in launch.kernel.arrays.items():
            writable = launch.kernel.variables[name].space == "global"
            memory.add(array.ctypes.data, len(array), f"variable {name}", writable)

    def _check_launch(self) -> None:
        launch, kernel = self.launch, self.launch.kernel
        check_launch(launch, self.program.shared_static)
        if len(launch.params) != len(kernel.params):
            raise EmulationError(
                f"{kernel.name}: {len(launch.params)} parameters, {len(kernel.params)} expected"
            )

    def _pack_params(self) -> Any:
        size = max(self.launch.kernel.param_bytes, 1)
        # Tensor maps want 64-byte alignment.
        raw = np.zeros(size + 128, np.uint8)
        start = -int(raw.ctypes.data) % 128
        buffer = raw[start : start + size]
        for param, value in zip(self.launch.kernel.params, self.launch.params, strict=True):
            if len(value) != param.size:
                raise EmulationError(
                    f"parameter {param.name}: {len(value)} bytes, {param.size} expected"
                )
            buffer[param.offset : param.offset + param.size] = np.frombuffer(value, np.uint8)
        return buffer

    def tick(self) -> int:
        """A clock that never stands still."""
        self._clock += 1
        return self._clock

    def run(self, progress: Callable[[int, int], None] | None) -> None:
        chosen = list(self._chosen())
        total = sum(map(len, chosen))
        done = 0
        waiting = iter(chosen)
        resident: list[ClusterScheduler] = []
        for scheduler in self._rounds(resident, waiting):
            resident.remove(scheduler)
            self._files.extend(cta.registers for cta in scheduler.ctas)
            done += len(scheduler.ctas)
            if progress is not None:
                progress(done, total)
        while self.async_work.complete_one(()):
            pass
        for store in self.late_stores:
            store.write()
        self.counters.ctas += total
        self._collect_counts()

    def _rounds(
        self,
        resident: list[ClusterScheduler],
        waiting: Iterator[list[Index3]],
    ) -> Iterator[ClusterScheduler]:
        """Yield each cluster when it has finished."""
        company = self.async_work.company()
        polls = 0
        while True:
            while len(resident) < company and self._admit(resident, waiting):
                pass
            if not resident:
                return
            moved = polled = False
            for scheduler in list(resident):
                steps, idle = self._advance(scheduler, len(resident) > 1)
                moved |= steps > idle
                polled |= steps > 0
                if scheduler.done:
                    yield scheduler
            polls = 0 if moved else polls + polled
            if moved or self._complete_load(resident) or (polled and polls < _POLL_ROUNDS):
                continue
            if len(resident) < _MAX_RESIDENT_CLUSTERS and self._admit(resident, waiting):
                polls = 0
                continue
            refused = [scheduler.refuse_waits() for scheduler in resident]
            if not any(refused):
                raise resident[0].deadlock()

    def _complete_load(self, resident: list[ClusterScheduler]) -> bool:
        awaited = {id(barrier) for scheduler in resident for barrier in scheduler.awaited()}
        return self.async_work.complete_one(awaited)

    def _advance(self, scheduler: ClusterScheduler, crowded: bool) -> tuple[int, int]:
        """Run a cluster until it stops, or for a while where others are resident too.

        Returns the steps, and how many of the last ones only polled.
        """
        steps = 0
        idle = 0
        turn = self.async_work.turn()
        while not scheduler.done and scheduler.step():
            steps += 1
            if scheduler.only_polls():
                idle += 1
                if idle > 16 + 2 * len(scheduler.fragments):
                    break
            else:
                idle = 0
            if crowded and steps >= turn:
                break
        return steps, idle

    def _chosen(self) -> Iterator[list[Index3]]:
        """The clusters to execute, in launch order."""
        ctas = self.launch.ctas
        if isinstance(ctas, int):
            count = int(np.prod(self.launch.grid) // np.prod(self.launch.cluster))
            wanted = max(1, min(ctas // int(np.prod(self.launch.cluster)), count))
            picked = {i * count // wanted for i in range(wanted)}
            yield from (c for i, c in enumerate(self._clusters()) if i in picked)
            return
        for cluster in self._clusters():
            if ctas is None or any(ctas(index) for index in cluster):
                yield cluster

    def _clusters(self) -> Iterable[list[Index3]]:
        """The clusters' CTAs in launch order; shuffled in the random schedule."""
        (gx, gy, gz), (cx, cy, cz) = self.launch.grid, self.launch.cluster
        corners: Iterable[Index3] = itertools.product(
            range(0, gz, cz), range(0, gy, cy), range(0, gx, cx)
        )
        if self.async_work.schedule == "random":
            corners = list(corners)
            self.async_work.random.shuffle(corners)
        for z, y, x in corners:
            yield [
                (x + i, y + j, z + k)
                for k, j, i in itertools.product(range(cz), range(cy), range(cx))
            ]

    def _admit(
        self,
        resident: list[ClusterScheduler],
        waiting: Iterator[list[Index3]],
    ) -> bool:
        indices = next(waiting, None)
        if indices is None:
            return False
        ctas = [Cta(self, next(_serials), i, self._register_file()) for i in indices]
        barrier = ClusterBarrier(sum(cta.threads for cta in ctas))
        tracker = Tracker(self.hazards, (self._threads + 31) // 32, len(ctas))
        for cta in ctas:
            cta.cluster, cta.cluster_barrier = ctas, barrier
            if self.full_checks:
                cta.track(tracker)
        resident.append(ClusterScheduler(self, ctas))
        return True

    def _register_file(self) -> RegisterFile:
        file = self._files.pop() if self._files else None
        if file is None:
            file = RegisterFile(self.program.rows, self._threads)
        file.poison()
        return file

    def _collect_counts(self) -> None:
        for segment in self.program.segments:
            if segment.warps_executed:
                segment.executed = True
                self.counters.warp_instructions += segment.instructions * segment.warps_executed
                times = segment.warps_executed
                self.counters.add_ops(segment.counts, segment.classes, times)
                self.counters.mufu += segment.mufu * segment.lanes_executed
                segment.warps_executed = segment.lanes_executed = 0
        self.counters.launches += 1
        self._count_unique_bytes()

    def _count_unique_bytes(self) -> None:
        counters = self.counters
        counters.unique_global_load_bytes += self.memory.loaded.count()
        counters.unique_global_store_bytes += self.memory.stored.count()
        loaded = counters.tma_load_bytes + counters.global_load_bytes
        counters.global_reread_bytes = max(loaded - counters.unique_global_load_bytes, 0)
