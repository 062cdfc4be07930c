"""How it is to be computed: kernels, tiles and launches as data, free of torch and cutlass."""

from hopperflash.plan.arch import ARCHS, ArchSpec, arch_of, arch_of_capability
from hopperflash.plan.config import ForwardConfig, POperand
from hopperflash.plan.explain import explain
from hopperflash.plan.launch_plan import (
    Copy,
    KernelCall,
    KernelRef,
    KernelSpec,
    LaunchPlan,
    Workspace,
)
from hopperflash.plan.planner import make_plan, supports
from hopperflash.plan.support import Support

__all__ = [
    "ARCHS",
    "ArchSpec",
    "Copy",
    "ForwardConfig",
    "KernelCall",
    "KernelRef",
    "KernelSpec",
    "LaunchPlan",
    "POperand",
    "Support",
    "Workspace",
    "arch_of",
    "arch_of_capability",
    "explain",
    "make_plan",
    "supports",
]
