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


def _forward_config(problem: AttnProblem, arch: ArchSpec) -> tuple[ForwardConfig, str]:
    capped = problem.softcap > 0.0
    tile = forward_tile(problem.head_dim, problem.head_dim_v, problem.mask.kind, capped)
    config = forward_config(tile, problem.head_dim, problem.head_dim_v)
    if folding_pays(problem, config.tile_m):
        saved = f"{problem.group} heads a tile: their {problem.seqlen_q} queries fill fewer tiles"
        return replace(config, group=problem.group), f"{tile.source}; {saved}"
    return config, tile.source


def folding_pays(problem: AttnProblem, tile_m: int) -> bool:
    """Whether tiles of all heads of a group are fewer by a tenth than those of one head each.

    Of packed sequences only the mean length is known. Tiles are tensor work, and each reads the
    keys anew. The margin keeps long sequences of any length with one kernel.
    """
    p = problem
    if p.group == 1 or p.group > tile_m:
        return False
    queries = p.seqlen_q if p.sequences is None else p.seqlen_q // max(1, p.sequences)
    folded = -(-queries // (tile_m // p.group))
    return 10 * folded <= 9 * p.group * -(-queries // tile_m)


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
