"""Problem and architecture to a launch plan."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, get_args

from hopperflash.errors import InvalidArgument, UnsupportedProblem
from hopperflash.plan.arch import ArchSpec, arch_of
from hopperflash.plan.backends import BACKENDS, checked_name
from hopperflash.plan.launch_plan import LaunchPlan, Steps
from hopperflash.plan.support import Support
from hopperflash.problem import AttnProblem, Direction

EMPTY = Steps(
    reasons=("no query sees a key: out and gradients are 0, LSE is -inf, without a launch",)
)


def supports(
    problem: AttnProblem,
    arch: ArchSpec,
    direction: Direction = "forward",
    backend: str | None = None,
) -> Support:
    """Whether some backend, or the one asked for, computes `problem`; else every reason by name."""
    _refuse_request(direction, backend)
    answers = _ask(problem, arch, direction)
    asked = [(name, answer) for name, answer in answers if _is_asked(name, backend)]
    if any(answer for _, answer in asked):
        return Support(True)
    return Support(False, tuple(f"{name}: {why}" for name, no in asked for why in no.reasons))


def request_reasons(direction: object, backend: Any = None, arch: Any = None) -> list[str]:
    """What is no direction, no backend or no arch, hashable or not; None asks for none."""
    reasons = []
    if direction not in get_args(Direction):
        reasons.append(f"direction is {direction!r}: give 'forward' or 'backward'")
    checks: tuple[tuple[Any, Callable[[Any], object]], ...] = (
        (backend, checked_name),
        (arch, arch_of),
    )
    for name, check in checks:
        if name is not None:
            try:
                check(name)
            except InvalidArgument as refused:
                reasons.append(refused.headline)
    return reasons


def make_plan(
    problem: AttnProblem,
    arch: ArchSpec,
    direction: Direction = "forward",
    backend: str | None = None,
) -> LaunchPlan:
    """The plan of the first backend that supports `problem` on `arch`, or of `backend` alone.

    Raises `UnsupportedProblem` with the reasons of every backend asked where none does, and
    `InvalidArgument` for an unknown backend.
    """
    _refuse_request(direction, backend)
    return _plan(problem, arch, direction, backend)


@lru_cache(maxsize=1024)
def _plan(
    problem: AttnProblem, arch: ArchSpec, direction: Direction, requested: str | None
) -> LaunchPlan:
    """`make_plan`, remembered: training repeats the same few problems in every step."""
    answers = _ask(problem, arch, direction)
    for backend, (name, answer) in zip(BACKENDS, answers, strict=True):
        if answer and _is_asked(name, requested):
            steps = EMPTY if problem.is_empty else backend.steps(problem, arch, direction)
            return LaunchPlan(problem, arch, direction, name, answers, steps, requested)
    refusal = supports(problem, arch, direction, requested)
    who = "no backend" if requested is None else f"backend {requested} does not"
    computes = "computes" if requested is None else "compute"
    raise UnsupportedProblem(f"{who} {computes} this {direction} on {arch.name}:", refusal.reasons)


def _is_asked(name: str, requested: str | None) -> bool:
    return requested is None or name == requested


def _refuse_request(direction: Direction, backend: str | None) -> None:
    reasons = request_reasons(direction, backend)
    if reasons:
        raise InvalidArgument("this cannot be planned:", reasons)


def _ask(
    problem: AttnProblem, arch: ArchSpec, direction: Direction
) -> tuple[tuple[str, Support], ...]:
    """Every backend's answer, best backend first."""
    return tuple((backend.name, backend.supports(problem, arch, direction)) for backend in BACKENDS)
