"""The Hopper backend: its kernels, and the configurations it makes of its tile table."""

from __future__ import annotations

from dataclasses import replace

from hopperflash.plan.arch import ArchSpec
from hopperflash.plan.config import BackwardConfig, ForwardConfig
from hopperflash.plan.family import KernelFamily
from hopperflash.plan.feasibility import check
from hopperflash.plan.launch_plan import KernelRef
from hopperflash.plan.tiles_sm90 import (
    backward_config,
    backward_tile,
    forward_config,
    forward_tile,
)
from hopperflash.problem import AttnProblem

_IDLE_LIMIT = 16  # of that many rows of a tile one may be idle


def _forward_config(problem: AttnProblem, arch: ArchSpec) -> tuple[ForwardConfig, str]:
    capped = problem.softcap > 0.0
    tile = forward_tile(problem.head_dim, problem.head_dim_v, problem.mask.kind, capped)
    config = forward_config(tile, problem.head_dim, problem.head_dim_v)
    if folding_pays(problem.group, config.tile_m):
        folded = f"{problem.group} heads that share keys in the rows of a tile"
        return replace(config, group=problem.group), f"{tile.source}; {folded}"
    return config, tile.source


def folding_pays(group: int, tile_m: int) -> bool:
    """Whether the rows of a tile should be all query heads of a group.

    A tile then holds fewer queries, so fewer rows are idle behind the last query and fewer blocks
    are cut by the diagonal; idle are the rows that the group does not divide. It is the group that
    decides and not the length, which must not ask for another kernel.
    """
    return 1 < group <= tile_m and _IDLE_LIMIT * (tile_m % group) <= tile_m


def _backward_config(problem: AttnProblem, arch: ArchSpec) -> tuple[BackwardConfig, str]:
    capped = problem.softcap > 0.0
    tile = backward_tile(problem.head_dim, problem.head_dim_v, problem.mask.kind, capped)
    return backward_config(tile, problem.head_dim, problem.head_dim_v), tile.source


SM90 = KernelFamily(
    feature="wgmma",
    reader="TMA",
    forward=KernelRef("hopperflash.kernels.sm90.fwd.kernel", "ForwardSm90"),
    backward=KernelRef("hopperflash.kernels.sm90.bwd.kernel", "BackwardSm90"),
    forward_config=_forward_config,
    backward_config=_backward_config,
    check=check,
)
