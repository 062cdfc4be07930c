"""How it is to be computed: kernels, tiles and launches as data, free of torch and cutlass."""

from hopperflash.plan.arch import ARCHS, ArchSpec, arch_of, arch_of_capability
from hopperflash.plan.config import (
    BackwardConfig,
    Config,
    ForwardConfig,
    POperand,
    PostprocessConfig,
    PreprocessConfig,
)
from hopperflash.plan.explain import explain
from hopperflash.plan.launch_plan import (
    Buffer,
    Copy,
    KernelCall,
    KernelRef,
    KernelSpec,
    LaunchPlan,
)
from hopperflash.plan.planner import make_plan, supports
from hopperflash.plan.support import Support

__all__ = [
    "ARCHS",
    "ArchSpec",
    "BackwardConfig",
    "Buffer",
    "Config",
    "Copy",
    "ForwardConfig",
    "KernelCall",
    "KernelRef",
    "KernelSpec",
    "LaunchPlan",
    "POperand",
    "PostprocessConfig",
    "PreprocessConfig",
    "Support",
    "arch_of",
    "arch_of_capability",
    "explain",
    "make_plan",
    "supports",
]
