"""`hopperflash explain`: the plan for a problem given by its sizes, without tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, cast

from hopperflash import plan
from hopperflash.cli.options import SizeOptions, Sizes, command, flag
from hopperflash.cli.output import print_json, stdout
from hopperflash.errors import InvalidArgument
from hopperflash.problem import AttnOptions, Direction, OperandFacts, build_problem


@dataclass(frozen=True)
class ExplainOptions(SizeOptions):
    """What `hopperflash explain` takes."""

    head_dim_v: Annotated[int | None, flag("Head dim of V.", show_default="head_dim")] = None
    window: Annotated[str | None, flag("LEFT,RIGHT keys a query sees; -1 is unbounded.")] = None
    softcap: Annotated[float, flag("Caps scores at this; 0 for none.")] = 0.0
    arch: Annotated[str, flag("Target, such as sm_90a, sm_80 or cpu.")] = "sm_90a"
    direction: Annotated[str, flag("forward or backward.")] = "forward"
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
    sizes = Sizes.of(options)
    arch = plan.arch_of(options.arch)
    device = "cpu" if arch.name == "cpu" else "cuda"

    def facts(shape: tuple[int, ...]) -> OperandFacts:
        strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
        return OperandFacts(shape, strides, 128, sizes.dtype.value, device)

    causal = sizes.causal if options.window is None else options.causal is True
    attention = AttnOptions(
        causal=causal, window_size=window_of(options.window), softcap=options.softcap
    )
    v_shape = (
        *sizes.k_shape[:3],
        sizes.head_dim if options.head_dim_v is None else options.head_dim_v,
    )
    problem = build_problem(facts(sizes.q_shape), facts(sizes.k_shape), facts(v_shape), attention)
    return plan.make_plan(problem, arch, cast(Direction, options.direction), options.backend)


def window_of(text: str | None) -> tuple[int, int]:
    """The window of a LEFT,RIGHT option; unbounded where it was not given."""
    if text is None:
        return (-1, -1)
    try:
        left, right = (int(side) for side in text.split(","))
    except ValueError:
        raise InvalidArgument(f"--window is {text!r}: give LEFT,RIGHT such as 512,0") from None
    return (left, right)
