"""The Hopper backend: its kernels, and the configurations it makes of its tile table."""

from __future__ import annotations

from dataclasses import replace

from hopperflash.plan.arch import ArchSpec
from hopperflash.plan.clusters import sharing
from hopperflash.plan.config import BackwardConfig, ForwardConfig
from hopperflash.plan.family import KernelFamily
from hopperflash.plan.feasibility import check
from hopperflash.plan.folding import fold_heads
from hopperflash.plan.launch_plan import KernelRef
from hopperflash.plan.tiles_sm90 import (
    backward_config,
    backward_tile,
    forward_config,
    forward_tile,
    is_plain,
)
from hopperflash.problem import AttnProblem


def _forward_config(problem: AttnProblem, arch: ArchSpec) -> tuple[ForwardConfig, str]:
    tile = forward_tile(problem.head_dim, problem.head_dim_v, problem.mask.kind)
    config = forward_config(tile, problem.head_dim, problem.head_dim_v)
    config, source = fold_heads(config, tile.source, problem.group)
    return replace(config, cluster_m=sharing(config, problem).ctas), source


def _backward_config(problem: AttnProblem, arch: ArchSpec) -> tuple[BackwardConfig, str]:
    head_dims = problem.head_dim, problem.head_dim_v
    tile = backward_tile(*head_dims, problem.mask.kind, is_plain(problem))
    config = backward_config(tile, *head_dims)
    return replace(config, cluster_n=sharing(config, problem).ctas), tile.source


SM90 = KernelFamily(
    feature="wgmma",
    reader="TMA",
    forward=KernelRef("hopperflash.kernels.sm90.fwd.kernel", "ForwardSm90"),
    backward=KernelRef("hopperflash.kernels.sm90.bwd.kernel", "BackwardSm90"),
    forward_config=_forward_config,
    backward_config=_backward_config,
    check=check,
    takes_tiles=True,
)
