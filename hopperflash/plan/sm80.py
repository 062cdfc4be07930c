"""The Ampere backend: its kernels, and the configurations it makes of its tile tables."""

from __future__ import annotations

from hopperflash.plan.arch import ArchSpec
from hopperflash.plan.config import BackwardConfigSm80, ForwardConfigSm80
from hopperflash.plan.family import KernelFamily
from hopperflash.plan.feasibility_sm80 import check
from hopperflash.plan.folding import fold_heads
from hopperflash.plan.launch_plan import KernelRef
from hopperflash.plan.tiles_sm80 import (
    backward_config,
    backward_tile,
    forward_config,
    forward_tile,
)
from hopperflash.problem import AttnProblem


def _forward_config(problem: AttnProblem, arch: ArchSpec) -> tuple[ForwardConfigSm80, str]:
    p = problem
    tile = forward_tile(p.head_dim, p.head_dim_v, p.mask.kind, arch)
    return fold_heads(forward_config(tile, p.head_dim, p.head_dim_v), tile.source, p.group)


def _backward_config(problem: AttnProblem, arch: ArchSpec) -> tuple[BackwardConfigSm80, str]:
    p = problem
    tile = backward_tile(p.head_dim, p.head_dim_v, p.mask.kind, arch, p.is_packed)
    return backward_config(tile, p.head_dim, p.head_dim_v), tile.source


SM80 = KernelFamily(
    feature="mma_sync",
    reader="cp.async",
    forward=KernelRef("hopperflash.kernels.sm80.fwd.kernel", "ForwardSm80"),
    backward=KernelRef("hopperflash.kernels.sm80.bwd.kernel", "BackwardSm80"),
    forward_config=_forward_config,
    backward_config=_backward_config,
    check=check,
)
