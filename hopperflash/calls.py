"""A call of a public function: its arguments checked, what problem they make, who computes it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from torch import Tensor

from hopperflash import plan
from hopperflash.errors import InvalidArgument
from hopperflash.plan import ArchSpec, LaunchPlan, make_plan
from hopperflash.problem import (
    GRADIENTS,
    HEADLINE,
    AttnOptions,
    AttnProblem,
    Direction,
    build_call,
    option_reasons,
)
from hopperflash.problem.lengths import LENGTHS
from hopperflash.runtime import device, preference, tensors
from hopperflash.runtime.tensors import Seen

MAX_SEQLENS = ("max_seqlen_q", "max_seqlen_k")
INPUTS = ("q", "k", "v")


@dataclass(frozen=True)
class Call:
    """An accepted call. `tensors` holds operands, lengths, and memory for results by name; what is
    packed lies in a batch of one."""

    problem: AttnProblem
    arch: ArchSpec
    direction: Direction
    backend: str | None
    tensors: Mapping[str, Tensor]

    @property
    def plan(self) -> LaunchPlan:
        """What computes it; `UnsupportedProblem` where nothing does."""
        return make_plan(self.problem, self.arch, self.direction, self.backend)

    def as_given(self, result: Tensor) -> Tensor:
        """A result in the layout of the arguments."""
        return result[0] if self.problem.is_packed else result


def accept(
    given: Mapping[str, object],
    options: AttnOptions,
    *,
    direction: Direction = "forward",
    gradients: Iterable[str] = GRADIENTS,
    arch: str | None = None,
    backend: str | None = None,
) -> Call:
    """Checks everything that can be wrong with the arguments of a call.

    `given` are tensors by name: "q", "k" and "v"; memory for "out"; for a backward "dout", "out",
    "lse", "dlse", and memory for "dq", "dk" and "dv". With one of `LENGTHS` they are packed.
    `gradients` are those a backward is to compute.
    Raises `InvalidArgument` with every reason found.
    """
    meta = arch is not None
    asked = plan.request_reasons(direction, backend, arch)
    kinds = [reason for item in given.items() for reason in _kind_reasons(*item, meta)]
    if kinds:
        others = [*option_reasons(options), *plan.unimplemented(options), *asked]
        raise InvalidArgument(HEADLINE, [*kinds, *others])
    found = {name: x for name, x in given.items() if isinstance(x, Tensor)}
    raw_lengths = {name: x for name, x in found.items() if name in LENGTHS}
    packed = any(name in given for name in LENGTHS)
    operands = {name: x for name, x in found.items() if name not in (*LENGTHS, *MAX_SEQLENS)}
    results = {
        name: operands.pop(name)
        for name in (("out",) if direction == "forward" else GRADIENTS)
        if name in operands
    }
    totals = {side: len(operands[side]) for side in "qk" if operands[side].dim()}
    reasons = [
        *tensors.value_reasons(raw_lengths, totals),
        *tensors.result_reasons(results, operands),
        *(f"{name} belongs to a backward" for name in _strangers(operands, direction)),
        *asked,
    ]
    operands |= {name: tensors.concrete(operands[name]) for name in INPUTS}
    lengths = tensors.int32(raw_lengths)
    seen = {name: tensors.seen(operands[name]) for name in INPUTS}
    if packed:
        operands, results = ({n: x[None] for n, x in some.items()} for some in (operands, results))
    beside = [*operands.items(), *results.items()]
    seen |= {name: tensors.seen(x) for name, x in beside if name not in INPUTS}
    seen_lengths = tuple((name, tensors.seen(x)) for name, x in lengths.items()) if packed else None
    arguments = (tuple(seen.items()), options, seen_lengths, direction, tuple(gradients))
    try:
        remembered = options.is_plain and not reasons
        problem = (_problem if remembered else _problem.__wrapped__)(*arguments)
    except InvalidArgument as refused:
        more = [*reasons, *plan.unimplemented(options)]
        raise InvalidArgument(refused.headline, [*refused.reasons, *more]) from None
    if reasons:
        raise InvalidArgument(HEADLINE, [*reasons, *plan.unimplemented(options)])
    backend = backend or preference.preferred()
    target = device.target_arch(operands["q"].device, arch, backend)
    return Call(problem, target, direction, backend, {**operands, **results, **lengths})


@lru_cache(maxsize=4096)
def _problem(
    operands: tuple[tuple[str, Seen], ...],
    options: AttnOptions,
    lengths: tuple[tuple[str, Seen], ...] | None,
    direction: Direction,
    gradients: tuple[str, ...],
) -> AttnProblem:
    """`build_call`, remembered: training repeats the same few calls in every step."""
    facts = {name: tensors.facts(seen) for name, seen in operands}
    of_lengths = None if lengths is None else {name: tensors.facts(seen) for name, seen in lengths}
    return build_call(facts, options, of_lengths, direction, gradients)


def _strangers(operands: Mapping[str, Tensor], direction: Direction) -> list[str]:
    return [name for name in operands if direction == "forward" and name not in INPUTS]


def _kind_reasons(name: str, value: object, meta: bool) -> list[str]:
    """What is not the kind of argument that its name says."""
    if name in MAX_SEQLENS:
        return list(tensors.max_seqlen_reasons(name, value))
    if name in LENGTHS:
        # Missing ones are refused with the rest that is wrong about lengths.
        return [] if value is None else list(tensors.lengths_reasons(name, value, meta=meta))
    return list(tensors.operand_reasons(name, value, meta=meta))
