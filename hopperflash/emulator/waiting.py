"""Why threads are blocked, and what lets them go on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from numpy.typing import NDArray

from .barriers import ClusterBarrier, MBarrier, NamedBarrier


class Condition(Protocol):
    """What blocked threads wait for."""

    def ready(self) -> bool: ...

    def resume(self) -> None:
        """Called once when ready, before the threads go on."""

    def give_up(self) -> bool:
        """Go on without success, where the instruction may; False where it may not."""

    def describe(self) -> str: ...


class Block(NamedTuple):
    """Lanes of a gang that must wait."""

    lanes: NDArray[Any]
    condition: Condition


@dataclass
class MBarrierWait:
    """try_wait and test_wait; both may return false, test_wait does so at once."""

    barrier: MBarrier
    parity: int
    flags: NDArray[Any]
    lanes: Any
    may_block: bool
    refusals: int = 0

    def ready(self) -> bool:
        return self.barrier.passed(self.parity)

    def resume(self) -> None:
        self.flags[self.lanes] = True

    def give_up(self) -> bool:
        return True

    def describe(self) -> str:
        return f"parity {self.parity} of mbarrier {self.barrier.describe()}"


@dataclass
class BarrierWait:
    """bar.sync."""

    barrier: NamedBarrier
    generation: int

    def ready(self) -> bool:
        return self.barrier.generation != self.generation

    def resume(self) -> None: ...

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

    def give_up(self) -> bool:
        return False

    def describe(self) -> str:
        return self.barrier.describe()
