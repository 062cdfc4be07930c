"""`emulate`: inside it, CPU tensors execute the real kernels in the PTX emulator."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

from hopperflash.emulator import EmulationRun, launch
from hopperflash.errors import InvalidArgument
from hopperflash.plan import ArchSpec, arch_of

SCHEDULES = ("eager", "lazy", "random")
CHECKS = ("full", "basic", "ordered")


@dataclass(frozen=True)
class EmulationSession:
    """The architecture that CPU tensors are planned for, and how its kernels are scheduled."""

    arch: ArchSpec
    schedule: str
    seed: int
    hazards: str = "full"
    progress: Callable[[int, int], None] | None = None
    run: EmulationRun = field(default_factory=EmulationRun)

    def launch(self, kernel: Any, operands: Sequence[Any]) -> None:
        """Executes one compiled kernel and adds to the run's launches, counters and hazards."""
        launch(
            kernel,
            *operands,
            schedule=self.schedule,
            seed=self.seed,
            hazards=self.hazards,
            progress=self.progress,
            run=self.run,
        )


_SESSION: ContextVar[EmulationSession | None] = ContextVar("hopperflash_emulation", default=None)


def session_of(device: torch.device) -> EmulationSession | None:
    """The innermost `emulate` block around this call, for tensors on a CPU; None for others."""
    return _SESSION.get() if device.type == "cpu" else None


@contextmanager
def resumed(session: EmulationSession | None) -> Iterator[None]:
    """Inside, CPU tensors execute in a session that began elsewhere, or in none."""
    token = _SESSION.set(session)
    try:
        yield
    finally:
        _SESSION.reset(token)


@contextmanager
def emulate(
    arch: str = "sm_90a",
    *,
    schedule: str = "lazy",
    seed: int = 0,
    hazards: str = "full",
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[EmulationRun]:
    """Plan CPU tensors for `arch` and execute its kernels without a GPU.

    Tensors on a GPU are not affected. Holds for the calling context (contextvars): a thread started
    inside the block does not inherit it.

    Args:
        arch: a GPU target, such as "sm_90a".
        schedule: when asynchronous work lands. "eager": at once; "lazy": as late as the rules
            allow, so that a missing wait is seen; "random": in an order drawn from `seed`.
        seed: the same seed gives the same run.
        hazards: "full" checks every access for races; "basic" leaves that out and is faster;
            "ordered" also wants floating-point sums in global memory in a fixed order.
        progress: called with (CTAs done, CTAs in the launch).

    Yields:
        The `EmulationRun`: `launches`, `counters`, `hazards`, `report()`.

    Raises:
        InvalidArgument: unknown arch or schedule.
    """
    spec, reasons = None, []
    try:
        spec = arch_of(arch)
    except InvalidArgument as refused:
        reasons.append(refused.headline)
    if spec is not None and spec.name == "cpu":
        reasons.append("arch 'cpu' is no GPU: leave `emulate` away to use the cpu backend")
    if schedule not in SCHEDULES:
        reasons.append(f"schedule {schedule!r}: give one of {', '.join(SCHEDULES)}")
    if hazards not in CHECKS:
        reasons.append(f"hazards {hazards!r}: give one of {', '.join(CHECKS)}")
    if reasons or spec is None:
        raise InvalidArgument("cannot emulate:", reasons)
    session = EmulationSession(spec, schedule, seed, hazards, progress)
    with resumed(session):
        yield session.run
