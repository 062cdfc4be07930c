"""Why threads are blocked, and what lets them go on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from numpy.typing import NDArray

from .barriers import ClusterBarrier, MBarrier, NamedBarrier
from .clocks import SyncPoint


class Condition(Protocol):
    """What blocked threads wait for."""

    def ready(self) -> bool: ...

    def resume(self) -> None:
        """Called once when ready, before the threads go on."""

    def point(self) -> SyncPoint:
        """What the threads know when they go on."""

    def give_up(self) -> bool:
        """Go on without success, where the instruction may; False where it may not."""

    def describe(self) -> str: ...


class Block(NamedTuple):
    """Lanes of a gang that must wait."""

    lanes: NDArray[Any]
    condition: Condition


@dataclass
class MBarrierWait:
    """try_wait and test_wait; both may return false."""

    barrier: MBarrier
    parity: int
    flags: NDArray[Any]
    lanes: Any
    relaxed: bool

    def ready(self) -> bool:
        return self.barrier.passed(self.parity)

    def resume(self) -> None:
        self.flags[self.lanes] = True

    def point(self) -> SyncPoint:
        return SyncPoint() if self.relaxed else self.barrier.done

    def give_up(self) -> bool:
        return True

    def describe(self) -> str:
        return f"parity {self.parity} of mbarrier {self.barrier.describe()}"


@dataclass
class BarrierWait:
    """bar.sync."""

    barrier: NamedBarrier
    generation: int
    left: SyncPoint

    def ready(self) -> bool:
        return self.barrier.generation != self.generation

    def resume(self) -> None: ...

    def point(self) -> SyncPoint:
        return self.left

    def give_up(self) -> bool:
        return False

    def describe(self) -> str:
        return self.barrier.describe()


@dataclass
class ClusterWait:
    """barrier.cluster.wait."""

    barrier: ClusterBarrier
    phase: int

    def ready(self) -> bool:
        return self.barrier.phase != self.phase

    def resume(self) -> None: ...

    def point(self) -> SyncPoint:
        return self.barrier.done

    def give_up(self) -> bool:
        return False

    def describe(self) -> str:
        return self.barrier.describe()
