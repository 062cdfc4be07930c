"""mbarriers with transaction counts, named barriers and the cluster barrier."""

from __future__ import annotations

from dataclasses import dataclass, field

from .clocks import SyncPoint
from .errors import BarrierError

_MAX_TX = (1 << 20) - 1


@dataclass
class MBarrier:
    """State of one mbarrier: a phase completes when pending and tx are both zero."""

    address: int
    expected: int
    pending: int = 0
    tx: int = 0
    phase: int = 0
    arrivals: SyncPoint = field(default_factory=SyncPoint)
    """What the arrivals so far made known."""
    done: SyncPoint = field(default_factory=SyncPoint)
    """What a successful wait comes to know: the arrivals of all completed phases."""
    entity: int = -1
    """Of the bulk loads that signal it; their clock is the number of completed phases."""
    last_load: int = 0
    """The phase, counted from 1, that the latest bulk load completes in."""
    origin: tuple[int, int] = (0, 0)
    """Who initialised it and when."""
    initialiser: int = 0
    """Its warp in the CTA."""
    fenced: bool = False
    """Whether a fence made the initialisation known to the async proxy."""

    def __post_init__(self) -> None:
        self.pending = self.expected

    def arrive(self, count: int) -> int:
        """Arrive `count` times; the token is the phase arrived in."""
        if count > self.pending:
            raise BarrierError(
                f"arrival of {count} on mbarrier {self.describe()}: more than its pending count"
            )
        token = self.phase
        self.pending -= count
        self._complete()
        return token

    def drop(self, count: int) -> int:
        self.expected -= count
        return self.arrive(count)

    def expect_tx(self, nbytes: int) -> None:
        self._add_tx(nbytes)

    def complete_tx(self, nbytes: int) -> None:
        self._add_tx(-nbytes)
        self._complete()

    def _add_tx(self, nbytes: int) -> None:
        self.tx += nbytes
        if abs(self.tx) > _MAX_TX:
            raise BarrierError(f"transaction count out of range: mbarrier {self.describe()}")

    def _complete(self) -> None:
        if self.pending == 0 and self.tx == 0:
            self.phase += 1
            self.pending = self.expected
            self.done = self.arrivals.copy()
            if self.entity >= 0:
                self.done.reach(self.entity, self.phase)

    def passed(self, parity: int) -> bool:
        """try_wait.parity: has the phase of this parity completed?"""
        return (self.phase & 1) != (parity & 1)

    def describe(self) -> str:
        return (
            f"{self.address:#x} (phase {self.phase}, pending {self.pending} of {self.expected}, "
            f"tx {self.tx})"
        )


@dataclass
class NamedBarrier:
    """bar/barrier: counts arriving threads and releases the waiters of the full generation."""

    number: int
    needed: int = 0
    arrived: int = 0
    generation: int = 0
    warps: list[int] = field(default_factory=list)
    votes: dict[int, list[int]] = field(default_factory=dict)
    """True predicates and threads of each generation that reduces, see bar.red."""
    point: SyncPoint = field(default_factory=SyncPoint)
    """What the arrivals of this generation made known."""

    def arrive(self, threads: int, needed: int, warps: list[int]) -> int:
        """Add threads; returns the generation they belong to."""
        if self.arrived and needed != self.needed:
            raise BarrierError(
                f"barrier {self.number}: expects {self.needed} threads, this arrival says {needed}"
            )
        generation = self.generation
        self.needed = needed
        self.arrived += threads
        self.warps.extend(warps)
        if self.arrived > needed:
            raise BarrierError(
                f"barrier {self.number}: {self.arrived} threads arrived for {needed} "
                f"(warps {sorted(self.warps)})"
            )
        if self.arrived == needed:
            self.generation += 1
            self.arrived = 0
            self.warps.clear()
            self.point = SyncPoint()
        return generation

    def describe(self) -> str:
        return f"barrier {self.number} ({self.arrived} of {self.needed} threads arrived)"


@dataclass
class ClusterBarrier:
    """barrier.cluster over all threads of a cluster."""

    needed: int
    arrived: int = 0
    phase: int = 0
    arrivals: SyncPoint = field(default_factory=SyncPoint)
    done: SyncPoint = field(default_factory=SyncPoint)

    def arrive(self, threads: int) -> int:
        phase = self.phase
        self.arrived += threads
        self._complete()
        return phase

    def leave(self, threads: int) -> None:
        """Threads that exited count as arrived from now on."""
        self.needed -= threads
        self._complete()

    def _complete(self) -> None:
        if self.needed and self.arrived >= self.needed:
            self.phase += 1
            self.arrived = 0
            self.done = self.arrivals.copy()

    def describe(self) -> str:
        return f"cluster barrier (phase {self.phase}, {self.arrived} of {self.needed} threads)"
