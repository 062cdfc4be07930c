"""Problem and architecture to a launch plan."""

from __future__ import annotations

from functools import lru_cache
from typing import get_args

from hopperflash.errors import InvalidArgument, UnsupportedProblem
from hopperflash.plan.arch import ArchSpec
from hopperflash.plan.backends import BACKENDS
from hopperflash.plan.launch_plan import LaunchPlan, Steps
from hopperflash.plan.support import Support
from hopperflash.problem import AttnProblem, Direction

EMPTY = Steps(
    reasons=("no query sees a key: out and gradients are 0, LSE is -inf, without a launch",)
)


def supports(problem: AttnProblem, arch: ArchSpec, direction: Direction = "forward") -> Support:
    """Whether some backend computes `problem`; if none does, every reason under its backend."""
    answers = _ask(problem, arch, direction)
    if any(answer for _, answer in answers):
        return Support(True)
    return Support(False, tuple(f"{name}: {why}" for name, no in answers for why in no.reasons))


def make_plan(problem: AttnProblem, arch: ArchSpec, direction: Direction = "forward") -> LaunchPlan:
    """The plan of the first backend that supports `problem` on `arch`.

    Raises `UnsupportedProblem` with the reasons of every backend where none does.
    """
    return _plan(problem, arch, direction)


@lru_cache(maxsize=1024)
def _plan(problem: AttnProblem, arch: ArchSpec, direction: Direction) -> LaunchPlan:
    """`make_plan`, remembered: training repeats the same few problems in every step."""
    answers = _ask(problem, arch, direction)
    for backend, (_, answer) in zip(BACKENDS, answers, strict=True):
        if answer:
            steps = EMPTY if problem.is_empty else backend.steps(problem, arch, direction)
            return LaunchPlan(problem, arch, direction, backend.name, answers, steps)
    refusal = supports(problem, arch, direction)
    raise UnsupportedProblem(
        f"no backend computes this {direction} on {arch.name}:", refusal.reasons
    )


def _ask(
    problem: AttnProblem, arch: ArchSpec, direction: Direction
) -> tuple[tuple[str, Support], ...]:
    """Every backend's answer, best backend first."""
    if direction not in get_args(Direction):
        raise InvalidArgument(f"direction is {direction!r}: give 'forward' or 'backward'")
    return tuple((backend.name, backend.supports(problem, arch, direction)) for backend in BACKENDS)
