"""The backends, best first; each is asked what it supports and then for its steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hopperflash.plan import sm90
from hopperflash.plan.arch import ArchSpec
from hopperflash.plan.launch_plan import Steps
from hopperflash.plan.support import Support
from hopperflash.problem import AttnProblem, Direction


@dataclass(frozen=True)
class Backend:
    """`supports` answers before anything else is decided; `steps` is asked only after a yes."""

    name: str
    summary: str
    supports: Callable[[AttnProblem, ArchSpec, Direction], Support]
    steps: Callable[[AttnProblem, ArchSpec, Direction], Steps]


def unimplemented(problem: AttnProblem) -> list[str]:
    """Options of the public signature that no backend honours, each with its reason."""
    reasons = []
    if problem.dropout_p > 0.0:
        reasons.append(f"dropout_p {problem.dropout_p}: dropout is not implemented; give 0")
    if problem.alibi:
        reasons.append("alibi_slopes: the ALiBi bias is not implemented; give None")
    if problem.return_attn_probs:
        reasons.append(
            "return_attn_probs: probabilities are never materialised; use return_lse=True"
        )
    return reasons


def _sm90_supports(problem: AttnProblem, arch: ArchSpec, direction: Direction) -> Support:
    answer = sm90.supports(problem, arch, direction)
    return Support.unless([*answer.reasons, *unimplemented(problem)])


def _sm80_supports(problem: AttnProblem, arch: ArchSpec, direction: Direction) -> Support:
    reasons = ["its kernels are not written yet"]
    if "mma_sync" not in arch.features:
        reasons.append(f"arch {arch.name} has no mma.sync")
    return Support.unless([*reasons, *unimplemented(problem)])


def _cpu_supports(problem: AttnProblem, arch: ArchSpec, direction: Direction) -> Support:
    reasons = []
    if arch.name != "cpu":
        reasons.append(f"arch is {arch.name}, not cpu")
    if problem.device != "cpu":
        reasons.append(f"the tensors are on {problem.device}, not on the cpu")
    return Support.unless([*reasons, *unimplemented(problem)])


def _no_kernels(problem: AttnProblem, arch: ArchSpec, direction: Direction) -> Steps:
    return Steps()


BACKENDS = (
    Backend("sm90", "wgmma and TMA, warp-specialised", _sm90_supports, sm90.steps),
    Backend("sm80", "mma.sync and cp.async", _sm80_supports, _no_kernels),
    Backend("cpu", "exact streaming attention in torch", _cpu_supports, _no_kernels),
)
