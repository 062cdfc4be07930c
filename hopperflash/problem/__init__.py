"""What is to be computed: canonical, checked, and free of torch and cutlass."""

from hopperflash.problem.dtypes import DType
from hopperflash.problem.mask import MaskKind, MaskSpec
from hopperflash.problem.problem import GRADIENTS, AttnProblem, Direction, OperandFacts, Signature
from hopperflash.problem.validate import AttnOptions, backward_problem, build_problem

__all__ = [
    "GRADIENTS",
    "AttnOptions",
    "AttnProblem",
    "DType",
    "Direction",
    "MaskKind",
    "MaskSpec",
    "OperandFacts",
    "Signature",
    "backward_problem",
    "build_problem",
]
