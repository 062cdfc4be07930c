"""`hopperflash explain`: the plan for a problem given by its sizes, without tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, cast

from hopperflash import plan
from hopperflash.cli.options import ProblemOptions, Sizes, command, flag
from hopperflash.cli.output import print_json, stdout
from hopperflash.problem import Direction, OperandFacts, build_problem
from hopperflash.problem.lengths import CU_SEQLENS


@dataclass(frozen=True)
class ExplainOptions(ProblemOptions):
    """What `hopperflash explain` takes."""

    head_dim_v: Annotated[int | None, flag("Head dim of V.", show_default="head_dim")] = None
    arch: Annotated[str, flag("Target, such as sm_90a, sm_80 or cpu.")] = "sm_90a"
    direction: Annotated[str, flag("forward or backward.")] = "forward"
    deterministic: Annotated[bool, flag("Gradients in a fixed order.", "--deterministic")] = False
    backend: Annotated[str | None, flag("sm90, sm80 or cpu; by default the first able one.")] = None
    json: Annotated[bool, flag("Print the plan as JSON.", "--json")] = False


@command(ExplainOptions)
def explain(options: ExplainOptions) -> None:
    """Print the plan for a problem of contiguous operands, with its reasons and arithmetic."""
    launch_plan = plan_of(options)
    if options.json:
        print_json(launch_plan)
    else:
        stdout().print(plan.explain(launch_plan), markup=False)


def plan_of(options: ExplainOptions) -> plan.LaunchPlan:
    """The plan; no tensor is made, so that sizes may be larger than memory."""
    sizes, seqlens = Sizes.of(options), options.packed_lengths
    arch = plan.arch_of(options.arch)
    device = "cpu" if arch.name == "cpu" else "cuda"

    def facts(shape: tuple[int, ...], dtype: str = sizes.dtype.value) -> OperandFacts:
        strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
        return OperandFacts(shape, strides, 16, dtype, device)

    head_dim_v = sizes.head_dim if options.head_dim_v is None else options.head_dim_v
    shapes: list[tuple[int, ...]] = [sizes.q_shape, sizes.k_shape, (*sizes.k_shape[:3], head_dim_v)]
    lengths = None
    if seqlens is not None:
        shapes = [(sum(seqlens), *shape[2:]) for shape in shapes]
        lengths = {name: facts((len(seqlens) + 1,), "int32") for name in CU_SEQLENS}
    q, k, v = map(facts, shapes)
    attention = replace(options.attention, deterministic=options.deterministic)
    problem = build_problem(q, k, v, attention, lengths)
    return plan.make_plan(problem, arch, cast(Direction, options.direction), options.backend)
