"""One launch in words and numbers: labelled blocks of lines for `explain`."""

from __future__ import annotations

from collections.abc import Iterator

from hopperflash.plan.block_range import Tiling, block_totals, query_block_totals
from hopperflash.plan.budget import MainConfig, registers, shared_memory
from hopperflash.plan.config import (
    BackwardConfig,
    ForwardConfig,
    PostprocessConfig,
    PreprocessConfig,
)
from hopperflash.plan.launch_plan import KernelCall, LaunchPlan
from hopperflash.problem import AttnProblem

Sections = Iterator[tuple[str, list[str]]]


def explain_call(call: KernelCall, plan: LaunchPlan) -> Sections:
    """The sections of one launch, in the order of reading."""
    yield "kernel", [f"{call.spec.ref.name} for {call.spec.target}", call.spec.ref.module]
    config = call.spec.config
    if isinstance(config, ForwardConfig):
        yield from _forward(config, call, plan)
    elif isinstance(config, BackwardConfig):
        yield from _backward(config, call, plan)
    else:
        yield "work", list(_rowwise_work(config))
        rows = f"tiles of {config.rows} rows"
        yield "grid", [f"{_grid(call, rows, 'heads')} of {config.threads} threads"]


def _forward(config: ForwardConfig, call: KernelCall, plan: LaunchPlan) -> Sections:
    rows = config.tile_m // config.consumer_warpgroups
    yield (
        "tile",
        [
            _tile(config),
            f"{config.stages_kv} stages of K and of V; P V takes P from {config.p_operand.value}",
        ],
    )
    yield (
        "roles",
        [
            f"warpgroup 0: producer (TMA loads), {config.registers_producer} registers",
            f"warpgroups 1-{config.consumer_warpgroups}: consumers of {rows} rows each (wgmma,"
            f" softmax, store), {config.registers_consumer} registers",
            _claim(config, plan),
        ],
    )
    yield "registers", list(_registers(config, plan))
    yield "shared", _shared_memory(config, plan)
    yield "grid", [_grid(call, "query tiles", "heads")]
    yield "K/V blocks", list(_blocks(config, plan.problem))


def _backward(config: BackwardConfig, call: KernelCall, plan: LaunchPlan) -> Sections:
    yield (
        "tile",
        [
            _tile(config),
            f"{config.stages_q} stages of Q and {config.stages_do} of dO;"
            f" dV and dK take P and dS from {config.p_operand.value}",
        ],
    )
    yield "roles", list(_backward_roles(config, plan))
    yield "registers", list(_registers(config, plan))
    yield "shared", _shared_memory(config, plan)
    yield "grid", [_grid(call, "key tiles", "key heads")]
    yield "Q blocks", list(_blocks(config, plan.problem))
    if config.needs("dq"):
        yield "dQ", [_dq_accumulation(config)]
    key_side = [name for name in ("dK", "dV") if config.needs(name.lower())]
    if key_side:
        yield ", ".join(key_side), [_group_sum(plan.problem)]


def _backward_roles(config: BackwardConfig, plan: LaunchPlan) -> Iterator[str]:
    store = ", warp 1 adds dQ tiles" if config.needs("dq") else ""
    yield f"warpgroup 0: warp 0 loads{store} (TMA), {config.registers_producer} registers"
    keys = config.tile_n // config.key_warpgroups
    share = f" and 1/{config.key_shares} of the columns" if config.key_shares > 1 else ""
    yield (
        f"warpgroups 1-{config.consumer_warpgroups}: consumers of {keys} keys{share} each"
        f" (wgmma, softmax, store), {config.registers_consumer} registers"
    )
    yield _claim(config, plan)


def _dq_accumulation(config: BackwardConfig) -> str:
    if config.deterministic:
        return (
            "added up in fp32 by TMA reduce-add; key tiles take turns in a fixed order:"
            " deterministic"
        )
    return "added up in fp32 by TMA reduce-add, in whatever order the key tiles come"


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


def _tile(config: MainConfig) -> str:
    return (
        f"{config.tile_m} queries x {config.tile_n} keys, head dims padded to"
        f" {config.head_dim} and {config.head_dim_v}"
    )


def _claim(config: MainConfig, plan: LaunchPlan) -> str:
    budget = registers(config, plan.arch)
    return f"{config.threads} threads claim {budget.claimed} registers of {budget.pool}"


def _registers(config: MainConfig, plan: LaunchPlan) -> Iterator[str]:
    budget = registers(config, plan.arch)
    peak = f"{budget.peak} + overhead {budget.overhead} = {budget.total} of {budget.limit}"
    if len(budget.phases) == 1:
        yield f"consumer thread: {peak}"
        return
    yield f"consumer thread, {budget.peak.name} phase: {peak}"
    for phase in budget.phases:
        if phase is not budget.peak:
            yield f"{phase.name} phase: {phase} + overhead = {phase.total + budget.overhead}"


def _shared_memory(config: MainConfig, plan: LaunchPlan) -> list[str]:
    budget = shared_memory(config, plan.problem.dtype.itemsize)
    limit = plan.arch.smem_bytes_per_block
    return [str(budget), f"= {budget.total} B aligned, of {limit} B per block"]


def _grid(call: KernelCall, tiles: str, heads: str) -> str:
    x, y, z = call.grid
    return f"{x} {tiles} x {y} {heads} x {z} batch = {x * y * z} CTAs"


def _blocks(config: MainConfig, problem: AttnProblem) -> Iterator[str]:
    tiling = Tiling(problem.seqlen_q, problem.seqlen_k, config.tile_m, config.tile_n)
    forward = isinstance(config, ForwardConfig)
    totals = (block_totals if forward else query_block_totals)(problem.mask, tiling)
    yield (
        f"per{'' if forward else ' query'} head: {totals.visited} visited"
        f" ({totals.unmasked} unmasked, {totals.masked} masked), {totals.skipped} skipped"
    )
    computed = totals.visited * config.tile_m * config.tile_n
    if computed:
        yield f"{100 * problem.visible_pairs / computed:.1f} % of the computed scores are visible"
