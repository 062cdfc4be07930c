"""The backends, best first; each is asked what it supports and then for its steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any

from hopperflash.errors import InvalidArgument
from hopperflash.plan.arch import ArchSpec
from hopperflash.plan.family import KernelFamily
from hopperflash.plan.launch_plan import Copy, Steps
from hopperflash.plan.sm80 import SM80
from hopperflash.plan.sm90 import SM90
from hopperflash.plan.support import Support
from hopperflash.problem import GRADIENTS, AttnOptions, AttnProblem, Direction

Asked = Callable[[AttnProblem, ArchSpec, Direction], Support]


@dataclass(frozen=True)
class Backend:
    """`supports` answers before anything else is decided; `steps` is asked only after a yes."""

    name: str
    summary: str
    supports: Asked
    steps: Callable[[AttnProblem, ArchSpec, Direction], Steps]


def unimplemented(asked: AttnProblem | AttnOptions) -> list[str]:
    """Options of the public signature that no backend honours, each with its reason.

    Those that a caller gave may be of any kind; what is no probability is refused as that.
    """
    reasons = []
    if isinstance(asked.dropout_p, Real) and 0.0 < asked.dropout_p < 1.0:
        reasons.append(f"dropout_p {asked.dropout_p}: dropout is not implemented; give 0")
    if asked.alibi:
        reasons.append("alibi_slopes: the ALiBi bias is not implemented; give None")
    if asked.return_attn_probs:
        reasons.append(
            "return_attn_probs: probabilities are never materialised; use return_lse=True"
        )
    return reasons


def _kernels(family: KernelFamily[Any, Any]) -> Asked:
    """What a kernel family supports, less what no backend honours."""

    def supports(problem: AttnProblem, arch: ArchSpec, direction: Direction) -> Support:
        answer = family.supports(problem, arch, direction)
        return Support.unless([*answer.reasons, *unimplemented(problem)])

    return supports


def _cpu_supports(problem: AttnProblem, arch: ArchSpec, direction: Direction) -> Support:
    reasons = []
    if arch.name != "cpu":
        reasons.append(f"arch is {arch.name}, not cpu")
    if problem.device not in ("cpu", "meta"):
        reasons.append(f"the tensors are on {problem.device}, not on the cpu")
    return Support.unless([*reasons, *unimplemented(problem)])


def _no_kernels(problem: AttnProblem, arch: ArchSpec, direction: Direction) -> Steps:
    results = ("out",) if direction == "forward" else GRADIENTS
    given = [name for name, _ in problem.operands if name in results]
    margin = f"sm_margin {problem.sm_margin}: the cpu has no SMs to leave free"
    return Steps(
        reasons=(margin,) if problem.sm_margin else (),
        copies_back=tuple(Copy(name, "torch computes it in memory of its own") for name in given),
    )


BACKENDS = (
    Backend("sm90", "wgmma and TMA, warp-specialised", _kernels(SM90), SM90.steps),
    Backend("sm80", "mma.sync and cp.async", _kernels(SM80), SM80.steps),
    Backend("cpu", "exact streaming attention in torch", _cpu_supports, _no_kernels),
)


def checked_name(name: str) -> str:
    """`name`, which must be that of a backend; `InvalidArgument` lists them where it is not."""
    names = [backend.name for backend in BACKENDS]
    if name not in names:
        raise InvalidArgument(f"unknown backend {name!r}: give one of {', '.join(names)}")
    return name
