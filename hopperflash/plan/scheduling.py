"""How many CTAs a main kernel gets: one a tile, or no more than leave SMs free."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TypeVar

from hopperflash.plan import budget, budget_sm80
from hopperflash.plan.arch import KIB, ArchSpec
from hopperflash.plan.config import (
    BackwardConfig,
    BackwardConfigSm80,
    ForwardConfig,
    ForwardConfigSm80,
    MainConfig,
    Scheduler,
)
from hopperflash.plan.launch_plan import KernelCall
from hopperflash.problem import AttnProblem

ConfigT = TypeVar("ConfigT", ForwardConfig, BackwardConfig, ForwardConfigSm80, BackwardConfigSm80)
Grid = tuple[int, int, int]

_DRIVER_BYTES = KIB  # of shared memory, of each resident CTA
_WITHOUT_ROOM = 64  # head dim of Ampere's forward whose threads use all registers
_MOST_REGISTERS = 256  # of a thread, as they are allocated


def scheduled(config: ConfigT, problem: AttnProblem) -> ConfigT:
    """The configuration with its scheduler: `sm_margin` takes a grid that tiles do not decide."""
    return persistent(config) if problem.sm_margin else config


def persistent(config: ConfigT) -> ConfigT:
    """The configuration whose CTAs compute several tiles.

    What a CTA knows of its next tile takes registers; Ampere's forward gives those of Q for them,
    without which head dim 64 would spill.
    """
    changes: dict[str, Any] = {"scheduler": Scheduler.PERSISTENT}
    if isinstance(config, ForwardConfigSm80) and config.head_dim == _WITHOUT_ROOM:
        changes["q_in_registers"] = False
    return replace(config, **changes)


def max_ctas(config: MainConfig, problem: AttnProblem, arch: ArchSpec) -> int:
    """CTAs of a kernel that run at once beside `sm_margin` free SMs."""
    return (arch.sms - problem.sm_margin) * ctas_per_sm(config, arch, problem.dtype.itemsize)


def ctas_per_sm(config: MainConfig, arch: ArchSpec, itemsize: int) -> int:
    """CTAs that an SM holds at least: by shared memory, and by registers if threads take all."""
    if isinstance(config, (ForwardConfigSm80, BackwardConfigSm80)):
        smem = budget_sm80.shared_memory(config, itemsize).total
    else:
        smem = budget.shared_memory(config, itemsize).total
    by_memory = arch.smem_bytes_per_sm // (smem + _DRIVER_BYTES)
    by_registers = arch.registers_per_sm // (_MOST_REGISTERS * config.threads)
    return max(1, min(by_memory, by_registers))


def placed(call: KernelCall, problem: AttnProblem, arch: ArchSpec) -> KernelCall:
    """A call whose grid is one CTA a tile, with the grid of its scheduler: of clusters, whole
    ones."""
    config = call.spec.config
    if isinstance(config, ForwardConfig) and config.cluster_m > 1:
        tiles, heads, batch = call.grid
        ctas = -(-tiles // config.cluster_m) * config.cluster_m
        return replace(call, grid=(ctas, heads, batch), tiles=call.grid)
    if not isinstance(config, MainConfig) or config.scheduler is Scheduler.SINGLE:
        return call
    ctas = min(math.prod(call.grid), max_ctas(config, problem, arch))
    return replace(call, grid=(ctas, 1, 1), tiles=call.grid)


def margin_reasons(problem: AttnProblem, arch: ArchSpec) -> list[str]:
    """Why `arch` cannot leave so many SMs free."""
    if not problem.sm_margin or problem.sm_margin < arch.sms:
        return []
    return [f"sm_margin {problem.sm_margin} leaves none of the {arch.sms} SMs to attention"]


def describe(call: KernelCall, problem: AttnProblem, arch: ArchSpec) -> Iterator[str]:
    """The scheduler of a main kernel, and why, in words for `explain`."""
    config = call.spec.config
    if not isinstance(config, MainConfig):
        return
    if config.scheduler is Scheduler.SINGLE:
        yield f"{config.scheduler.value}: a CTA computes one tile; no SM has to stay free"
        return
    each = ctas_per_sm(config, arch, problem.dtype.itemsize)
    most = max_ctas(config, problem, arch)
    yield (
        f"{config.scheduler.value}: sm_margin {problem.sm_margin} of {arch.sms} SMs leaves"
        f" {arch.sms - problem.sm_margin} x {each} CTAs = {most}"
    )
    yield f"{call.grid[0]} CTAs stride over {math.prod(call.tiles or call.grid)} tiles"
