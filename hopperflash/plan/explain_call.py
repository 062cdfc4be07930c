"""One launch in words and numbers: labelled blocks of lines for `explain`."""

from __future__ import annotations

import math
from collections.abc import Iterator

from hopperflash.plan import budget, budget_sm80
from hopperflash.plan.arch import ArchSpec
from hopperflash.plan.block_range import Tiling, key_block_totals, query_block_totals
from hopperflash.plan.budget import RegisterBudget, SharedMemoryBudget
from hopperflash.plan.clusters import cluster_reason
from hopperflash.plan.config import (
    BackwardConfig,
    BackwardConfigSm80,
    ForwardConfig,
    ForwardConfigSm80,
    MainConfig,
    PostprocessConfig,
    PreprocessConfig,
    TileTableConfig,
)
from hopperflash.plan.cost import tile_step
from hopperflash.plan.explain_roles import operand_notes, roles
from hopperflash.plan.launch_plan import KernelCall, LaunchPlan
from hopperflash.plan.scheduling import describe
from hopperflash.plan.units import HOPPER
from hopperflash.problem import AttnProblem

Sections = Iterator[tuple[str, list[str]]]


def explain_call(call: KernelCall, plan: LaunchPlan) -> Sections:
    """The sections of one launch, in the order of reading."""
    yield "kernel", [f"{call.spec.ref.name} for {call.spec.target}", call.spec.ref.module]
    config = call.spec.config
    if isinstance(config, TileTableConfig):
        yield "work", list(_table_work(config))
        yield "grid", [f"a CTA of {config.threads} threads for each of {call.grid[0]} tables"]
        return
    if isinstance(config, (PreprocessConfig, PostprocessConfig)):
        yield "work", list(_rowwise_work(config))
        grid = _grid(call, plan, f"tiles of {config.tile_m} rows", "heads")
        yield "grid", [f"{grid} of {config.threads} threads"]
        return
    yield "tile", [_tile(config), operand_notes(config)]
    yield "roles", list(roles(config, plan.arch))
    smem, registers = _budgets(config, plan)
    yield "registers", list(_registers(registers, config))
    yield "shared", _shared_memory(smem, plan.arch)
    if isinstance(config, (ForwardConfig, BackwardConfig)):
        yield "model", list(_model(config, plan.problem.dtype.itemsize))
    if isinstance(config, (ForwardConfig, ForwardConfigSm80)):
        heads = "key heads" if config.group > 1 else "heads"
        yield "scheduler", list(describe(call, plan))
        if isinstance(config, ForwardConfig):
            yield "cluster", [cluster_reason(config, plan.problem)]
        yield "grid", [_grid(call, plan, "query tiles", heads)]
        yield "K/V blocks", list(_blocks(config, plan.problem))
        return
    yield "scheduler", list(describe(call, plan))
    if isinstance(config, BackwardConfig):
        yield "cluster", [cluster_reason(config, plan.problem)]
    yield "grid", [_grid(call, plan, "key tiles", "key heads")]
    yield "Q blocks", list(_blocks(config, plan.problem))
    if config.needs("dq"):
        yield "dQ", [_dq_accumulation(config)]
    key_side = [name for name in ("dK", "dV") if config.needs(name.lower())]
    if key_side:
        yield ", ".join(key_side), [_group_sum(plan.problem)]


def _dq_accumulation(config: BackwardConfig | BackwardConfigSm80) -> str:
    by = "red.add of four values" if isinstance(config, BackwardConfig) else "red.add"
    if config.deterministic:
        return f"added up in fp32 by {by}; key tiles take turns in a fixed order: deterministic"
    return f"added up in fp32 by {by}, in whatever order the key tiles come"


def _group_sum(problem: AttnProblem) -> str:
    if problem.group == 1:
        return "summed in registers, written once"
    return (
        f"GQA: summed over the {problem.group} query heads of a group in registers, written"
        " once; no fp32 accumulators"
    )


def _rowwise_work(config: PreprocessConfig | PostprocessConfig) -> Iterator[str]:
    if isinstance(config, PostprocessConfig):
        yield "dQ = softmax_scale * dq_acc, in the input dtype"
        return
    yield "delta = rowsum(dO * O) - dLSE; LSE in base 2"
    if config.zero_dq:
        yield "zeros into dq_acc"


def _table_work(config: TileTableConfig) -> Iterator[str]:
    for side, tile in (("queries", config.tile_m), ("keys", config.tile_n)):
        if tile is not None:
            yield f"lists the tiles of {tile} {side} from the lengths, longest sequences first"


def _tile(config: MainConfig) -> str:
    rows = f"{config.tile_m} queries"
    if isinstance(config, (ForwardConfig, ForwardConfigSm80)) and config.group > 1:
        rows = f"{config.queries} queries of {config.group} heads"
    return (
        f"{rows} x {config.tile_n} keys, head dims padded to"
        f" {config.head_dim} and {config.head_dim_v}"
    )


def _budgets(config: MainConfig, plan: LaunchPlan) -> tuple[SharedMemoryBudget, RegisterBudget]:
    itemsize = plan.problem.dtype.itemsize
    if isinstance(config, (ForwardConfigSm80, BackwardConfigSm80)):
        smem = budget_sm80.shared_memory(config, itemsize)
        return smem, budget_sm80.registers(config, plan.arch)
    return budget.shared_memory(config, itemsize), budget.registers(config, plan.arch)


def _registers(found: RegisterBudget, config: MainConfig) -> Iterator[str]:
    hopper = isinstance(config, (ForwardConfig, BackwardConfig))
    thread = "consumer thread" if hopper else "thread"
    peak = f"{found.peak} + overhead {found.overhead} = {found.total} of {found.limit}"
    if len(found.phases) == 1:
        yield f"{thread}: {peak}"
        return
    yield f"{thread}, {found.peak.name} phase: {peak}"
    for phase in found.phases:
        if phase is not found.peak:
            yield f"{phase.name} phase: {phase} + overhead = {phase.total + found.overhead}"


def _shared_memory(found: SharedMemoryBudget, arch: ArchSpec) -> list[str]:
    limit = arch.smem_bytes_per_block
    return [str(found), f"= {found.total} B aligned, of {limit} B per block"]


def _model(config: ForwardConfig | BackwardConfig, itemsize: int) -> Iterator[str]:
    step = tile_step(config, itemsize)
    units = step.units
    block = "key block" if isinstance(config, ForwardConfig) else "query block"
    yield f"clocks of a {block}: {units}"
    demand = units.l2_demand * HOPPER.l2_bytes
    yield f"bound by {units.bound.unit}; {demand:.1f} B a clock asked of L2"
    yield (
        f"{step.instructions:.0f} instructions per thread,"
        f" {step.instructions_per_score:.2f} a score"
    )


def _grid(call: KernelCall, plan: LaunchPlan, tiles: str, heads: str) -> str:
    x, y, z = call.all_tiles
    count = math.prod(call.grid)
    ctas = "CTAs" if count == x * y * z else f"tiles for {count} CTAs"
    if not plan.problem.is_packed:
        return f"{x} {tiles} x {y} {heads} x {z} batch = {x * y * z} {ctas}"
    count = plan.problem.heads_k if heads == "key heads" else plan.problem.heads_q
    return f"at most {x // count} {tiles} x {count} {heads} = {x} {ctas}"


def _blocks(config: MainConfig, problem: AttnProblem) -> Iterator[str]:
    if problem.is_packed:
        yield "those with a visible pair, by the lengths of each sequence"
        return
    forward = isinstance(config, (ForwardConfig, ForwardConfigSm80))
    folded = config.group if isinstance(config, (ForwardConfig, ForwardConfigSm80)) else 1
    queries = config.tile_m // folded
    tiling = Tiling(problem.seqlen_q, problem.seqlen_k, queries, config.tile_n)
    totals = (key_block_totals if forward else query_block_totals)(problem.mask, tiling)
    head = "key head" if folded > 1 else "head" if forward else "query head"
    yield (
        f"per {head}: {totals.visited} visited"
        f" ({totals.unmasked} unmasked, {totals.masked} masked), {totals.skipped} skipped"
    )
    computed = totals.visited * config.tile_m * config.tile_n
    if computed:
        visible = folded * problem.visible_pairs
        yield f"{100 * visible / computed:.1f} % of the computed scores are visible"
