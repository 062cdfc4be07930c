"""What is to be computed: canonical, checked, and free of torch and cutlass."""

from hopperflash.problem.dtypes import DType
from hopperflash.problem.mask import MaskKind, MaskSpec
from hopperflash.problem.problem import GRADIENTS, AttnProblem, Direction, OperandFacts, Signature
from hopperflash.problem.validate import (
    HEADLINE,
    AttnOptions,
    backward_problem,
    build_call,
    build_problem,
    option_reasons,
    with_result,
)

__all__ = [
    "GRADIENTS",
    "HEADLINE",
    "AttnOptions",
    "AttnProblem",
    "DType",
    "Direction",
    "MaskKind",
    "MaskSpec",
    "OperandFacts",
    "Signature",
    "backward_problem",
    "build_call",
    "build_problem",
    "option_reasons",
    "with_result",
]
