"""What will run, as data: kernels with their configurations, copies, workspaces, and why."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hopperflash.plan.arch import ArchSpec
from hopperflash.plan.config import Config
from hopperflash.plan.support import Support
from hopperflash.problem import AttnProblem, Direction, Signature

NOTHING = "nothing"
ITEMSIZE = {"float32": 4, "int32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class KernelRef:
    """Where a kernel class lives; a string, so that planning does not import device code."""

    module: str
    name: str


@dataclass(frozen=True)
class KernelSpec:
    """All that compiling takes, and therefore the cache key; `target` as in `ArchSpec.name`.

    A `dependent` kernel starts while the one before it in the stream ends, and waits by itself.
    """

    ref: KernelRef
    config: Config
    signature: Signature
    target: str
    dependent: bool = False


@dataclass(frozen=True)
class KernelCall:
    """One launch: arguments by name, in the kernel's order, and the grid in CTAs.

    `NOTHING` stands for an argument that this variant of the kernel does not take. `tiles` is what
    the CTAs compute, in blocks, heads and batch entries, where the grid does not say it.
    """

    spec: KernelSpec
    operands: tuple[str, ...]
    grid: tuple[int, int, int]
    tiles: tuple[int, int, int] | None = None

    @property
    def all_tiles(self) -> tuple[int, int, int]:
        """Blocks, heads and batch entries."""
        return self.tiles or self.grid


@dataclass(frozen=True)
class Buffer:
    """Contiguous device memory to allocate for the calls; `shape` in elements of `dtype`.

    `zeroed` where the calls want zeros in it; otherwise they write whatever of it is read.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    zeroed: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return math.prod(self.shape) * ITEMSIZE[self.dtype]


@dataclass(frozen=True)
class Copy:
    """An operand that is made contiguous before the launch, or a result that is copied to where it
    was asked for after it; and what about that tensor demands it."""

    operand: str
    reason: str


@dataclass(frozen=True)
class Steps:
    """What a backend does for a problem; without calls it runs no kernel of this package.

    Operands of the calls are those of the problem, the `scalars`, the `workspaces`, which no one
    reads afterwards, and the `results`, which are handed out. A result that is an operand of the
    problem too is written there, by way of a copy if it is among `copies_back`.
    """

    calls: tuple[KernelCall, ...] = ()
    copies: tuple[Copy, ...] = ()
    scalars: tuple[tuple[str, float | int], ...] = ()
    workspaces: tuple[Buffer, ...] = ()
    results: tuple[Buffer, ...] = ()
    copies_back: tuple[Copy, ...] = ()
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class LaunchPlan:
    """The backend that takes a problem and its steps.

    `answers` holds what every backend said, in order of preference; `backend` is the first that
    agreed, or the one that was `requested`.
    """

    problem: AttnProblem
    arch: ArchSpec
    direction: Direction
    backend: str
    answers: tuple[tuple[str, Support], ...]
    steps: Steps
    requested: str | None = None

    @property
    def calls(self) -> tuple[KernelCall, ...]:
        """Launches in order."""
        return self.steps.calls

    @property
    def copies(self) -> tuple[Copy, ...]:
        """Operands to make contiguous first."""
        return self.steps.copies

    @property
    def copies_back(self) -> tuple[Copy, ...]:
        """Results to copy to where they were asked for."""
        return self.steps.copies_back

    @property
    def workspaces(self) -> tuple[Buffer, ...]:
        """Scratch to allocate."""
        return self.steps.workspaces

    @property
    def results(self) -> tuple[Buffer, ...]:
        """What the calls compute."""
        return self.steps.results
