"""How it is to be computed: kernels, tiles and launches as data, free of torch and cutlass."""

from hopperflash.plan.arch import ARCHS, ArchSpec, arch_of, arch_of_capability
from hopperflash.plan.backends import checked_name, unimplemented
from hopperflash.plan.config import (
    BackwardConfig,
    BackwardConfigSm80,
    Config,
    ForwardConfig,
    ForwardConfigSm80,
    POperand,
    PostprocessConfig,
    PreprocessConfig,
)
from hopperflash.plan.explain import explain
from hopperflash.plan.launch_plan import (
    NOTHING,
    Buffer,
    Copy,
    KernelCall,
    KernelRef,
    KernelSpec,
    LaunchPlan,
)
from hopperflash.plan.planner import make_plan, request_reasons, supports
from hopperflash.plan.support import Support

__all__ = [
    "ARCHS",
    "NOTHING",
    "ArchSpec",
    "BackwardConfig",
    "BackwardConfigSm80",
    "Buffer",
    "Config",
    "Copy",
    "ForwardConfig",
    "ForwardConfigSm80",
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
    "checked_name",
    "explain",
    "make_plan",
    "request_reasons",
    "supports",
    "unimplemented",
]
