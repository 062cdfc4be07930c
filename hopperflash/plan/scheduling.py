"""Who computes which tile of a main kernel and when: its scheduler, and the order of tiles.

`docs/scheduling.md` has the arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TypeVar

from hopperflash.plan import budget, budget_sm80
from hopperflash.plan.arch import KIB, ArchSpec
from hopperflash.plan.block_range import Tiling, key_block_totals
from hopperflash.plan.config import (
    BackwardConfig,
    BackwardConfigSm80,
    ForwardConfig,
    ForwardConfigSm80,
    MainConfig,
    Scheduler,
    cluster_of,
)
from hopperflash.plan.cost import tile_step
from hopperflash.plan.launch_plan import KernelCall, LaunchPlan
from hopperflash.problem import AttnProblem, MaskKind

ConfigT = TypeVar("ConfigT", ForwardConfig, BackwardConfig, ForwardConfigSm80, BackwardConfigSm80)
Grid = tuple[int, int, int]

_DRIVER_BYTES = KIB  # of shared memory, of each resident CTA
_WITHOUT_ROOM = 64  # head dim of Ampere's forward whose threads use all registers
_MOST_REGISTERS = 256  # of a thread, as they are allocated

# Clocks of a Hopper forward tile in which its CTA multiplies nothing: fitted to the speeds that
# FlashAttention-3 reports by length, 1.2 to 1.55 steps of 2816. Of several tiles all but the first
# load while the one before is stored.
ALONE_CLOCKS = 3600
BEHIND_ANOTHER_CLOCKS = 1400
# Of the launch that zeroes the counter of a dynamic kernel: 2 us.
ZEROING_CLOCKS = 3500
# What pairs of CTAs are taken to save where L2 would be at its edge without them, of all clocks.
CLUSTER_WORTH = 0.04
# Of L2, for the keys and values of heads whose tiles take turns.
_L2_SHARE = 2 / 3
_FP32 = 4


def scheduled(config: ConfigT, problem: AttnProblem, arch: ArchSpec, tiles: int) -> ConfigT:
    """The configuration with the scheduler for so many tiles; a dynamic one is without clusters."""
    scheduler = _scheduler(config, problem, arch, tiles)
    return config if scheduler is Scheduler.SINGLE else walking(config, scheduler)


def _scheduler(config: MainConfig, problem: AttnProblem, arch: ArchSpec, tiles: int) -> Scheduler:
    """Single-tile unless something speaks for another.

    `sm_margin` takes a grid that tiles do not decide. Without it several tiles a CTA pay in the
    Hopper forward, whose SM holds one CTA: if tiles cost the same each CTA may stride over them,
    otherwise one takes the next when it is done, if that saves more than its counter costs, and
    more than pairs of CTAs are worth, which start together.
    """
    if not isinstance(config, ForwardConfig):
        return Scheduler.PERSISTENT if problem.sm_margin else Scheduler.SINGLE
    waves = tiles / max_ctas(config, problem, arch)
    saved = (waves - 1) * (ALONE_CLOCKS - BEHIND_ANOTHER_CLOCKS)
    if tiles_cost_the_same(problem):
        return Scheduler.PERSISTENT if problem.sm_margin or saved > 0 else Scheduler.SINGLE
    cost = float(ZEROING_CLOCKS)
    if config.cluster_m > 1:
        cost += CLUSTER_WORTH * _multiplying_clocks(config, problem) / arch.sms
    return Scheduler.DYNAMIC if problem.sm_margin or saved > cost else Scheduler.SINGLE


def _multiplying_clocks(config: ForwardConfig, problem: AttnProblem) -> float:
    """Of all tiles together, by the model."""
    p = problem
    tiling = Tiling(p.seqlen_q, p.seqlen_k, config.queries, config.tile_n)
    steps = key_block_totals(p.mask, tiling).visited * p.batch * p.heads_q // config.group
    return steps * tile_step(config, p.dtype.itemsize).units.bound.clocks


def tiles_cost_the_same(problem: AttnProblem) -> bool:
    """Whether all tiles visit as many blocks as any other."""
    return problem.mask.kind is MaskKind.FULL and not problem.is_packed


def head_swizzle(config: MainConfig, problem: AttnProblem, arch: ArchSpec) -> int:
    """How many heads take turns with their tiles, so that the longest tiles of all come first.

    As many as divide the heads and leave what their tiles stream in L2. One where tiles cost about
    the same, or wait for each other.
    """
    p, row = problem, (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize
    if p.mask.kind is not MaskKind.CAUSAL or p.is_packed:
        return 1
    if isinstance(config, (ForwardConfig, ForwardConfigSm80)):
        heads = p.heads_q // config.group
        fit = heads // p.heads_k * _in_l2(arch, p.seqlen_k * row)
    elif config.deterministic:
        return 1
    else:
        # Q and dO of the query heads of a key head, and their dQ in fp32.
        heads, fit = p.heads_k, _in_l2(arch, p.group * p.seqlen_q * (row + p.head_dim * _FP32))
    return max(n for n in range(1, heads + 1) if heads % n == 0 and (n == 1 or n <= fit))


def _in_l2(arch: ArchSpec, size: int) -> int:
    return int(_L2_SHARE * arch.l2_bytes) // max(1, size)


def walking(config: ConfigT, scheduler: Scheduler = Scheduler.PERSISTENT) -> ConfigT:
    """The configuration whose CTAs compute several tiles, in pairs only if they know which.

    What a CTA knows of its next tile takes registers; Ampere's forward gives those of Q for them,
    without which head dim 64 would spill.
    """
    changes: dict[str, Any] = {"scheduler": scheduler}
    if isinstance(config, ForwardConfig) and scheduler is Scheduler.DYNAMIC:
        changes["cluster_m"] = 1
    if isinstance(config, ForwardConfigSm80) and config.head_dim == _WITHOUT_ROOM:
        changes["q_in_registers"] = False
    return replace(config, **changes)


def max_ctas(config: MainConfig, problem: AttnProblem, arch: ArchSpec) -> int:
    """CTAs of a kernel that run at once beside `sm_margin` free SMs, in whole clusters."""
    ctas = (arch.sms - problem.sm_margin) * ctas_per_sm(config, arch, problem.dtype.itemsize)
    cluster = cluster_of(config)
    return max(cluster, ctas - ctas % cluster)


def ctas_per_sm(config: MainConfig, arch: ArchSpec, itemsize: int) -> int:
    """CTAs that an SM holds at least: by shared memory, and by registers if threads take all."""
    if isinstance(config, (ForwardConfigSm80, BackwardConfigSm80)):
        smem = budget_sm80.shared_memory(config, itemsize).total
    else:
        smem = budget.shared_memory(config, itemsize).total
    by_memory = arch.smem_bytes_per_sm // (smem + _DRIVER_BYTES)
    by_registers = arch.registers_per_sm // (_MOST_REGISTERS * config.threads)
    return max(1, min(by_memory, by_registers))


def placed(call: KernelCall, problem: AttnProblem, arch: ArchSpec, swizzle: int) -> KernelCall:
    """A call whose grid is (blocks, heads, batch), with that of its scheduler and order; of
    clusters, whole ones."""
    config = call.spec.config
    if not isinstance(config, MainConfig):
        return call
    blocks, heads, batch = call.grid
    blocks = -(-blocks // cluster_of(config)) * cluster_of(config)
    if config.scheduler is Scheduler.SINGLE:
        if (blocks, swizzle) == (call.grid[0], 1):
            return call
        return replace(call, grid=(blocks * swizzle, heads // swizzle, batch), tiles=call.grid)
    ctas = min(blocks * heads * batch, max_ctas(config, problem, arch))
    return replace(call, grid=(ctas, 1, 1), tiles=call.grid)


def margin_reasons(problem: AttnProblem, arch: ArchSpec) -> list[str]:
    """Why `arch` cannot leave so many SMs free."""
    if not problem.sm_margin or problem.sm_margin < arch.sms:
        return []
    return [f"sm_margin {problem.sm_margin} leaves none of the {arch.sms} SMs to attention"]


def describe(call: KernelCall, plan: LaunchPlan) -> Iterator[str]:
    """The scheduler of a main kernel, its order of tiles, and why, in words for `explain`."""
    config, problem, arch = call.spec.config, plan.problem, plan.arch
    if not isinstance(config, MainConfig):
        return
    scheduler, tiles = config.scheduler, math.prod(call.all_tiles)
    if scheduler is Scheduler.SINGLE:
        why = "no SM has to stay free"
        if isinstance(config, ForwardConfig):
            why = f"{tiles} leave nothing to gain from several a CTA"
            if config.cluster_m > 1 and tiles > max_ctas(config, problem, arch):
                why = "pairs of CTAs are worth more than tiles taken one by one"
        yield f"{scheduler.value}: a CTA computes one tile; {why}"
    else:
        each = ctas_per_sm(config, arch, problem.dtype.itemsize)
        free = arch.sms - problem.sm_margin
        sms = f"{free} SMs"
        if problem.sm_margin:
            sms = f"sm_margin {problem.sm_margin} of {arch.sms} SMs leaves {free}"
        yield f"{scheduler.value}: {sms} x {each} CTAs = {free * each}"
        how = "stride over" if scheduler is Scheduler.PERSISTENT else "take one by one"
        yield f"{call.grid[0]} CTAs {how} {tiles} tiles"
    swizzle = dict(plan.steps.scalars)["head_swizzle"]
    if swizzle > 1:
        yield f"{swizzle} heads take turns, longest tiles first; what they stream stays in L2"
