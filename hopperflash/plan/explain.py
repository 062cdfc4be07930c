"""A launch plan in words and numbers, for people at a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from hopperflash.plan.backends import BACKENDS
from hopperflash.plan.block_range import Tiling, block_totals
from hopperflash.plan.budget import registers, shared_memory
from hopperflash.plan.launch_plan import KernelCall, LaunchPlan

LABEL_WIDTH = 11
LINE_WIDTH = 78


def explain(plan: LaunchPlan) -> str:
    """The problem, who takes it and why, and what will run: one labelled block of lines each."""
    sections = [
        ("problem", list(_problem(plan))),
        ("backends", list(_backends(plan))),
        ("because", list(plan.steps.reasons)),
    ]
    for call in plan.calls:
        sections += [
            ("kernel", [f"{call.spec.ref.name} for {call.spec.target}", call.spec.ref.module]),
            ("tile", list(_tile(call))),
            ("roles", list(_roles(call, plan))),
            ("registers", list(_registers(call, plan))),
            ("shared", list(_shared_memory(call, plan))),
            ("grid", list(_grid(call))),
            ("K/V blocks", list(_blocks(call, plan))),
        ]
    copies = [f"{copy.operand}: {copy.reason}" for copy in plan.copies]
    workspaces = [f"{item.name} {item.shape} {item.dtype}" for item in plan.workspaces]
    if plan.calls:
        sections += [("copies", copies or ["none"]), ("workspaces", workspaces or ["none"])]
    return "\n".join(line for label, lines in sections for line in _section(label, lines))


def _section(label: str, lines: list[str]) -> Iterator[str]:
    """`label` beside the first line; long lines wrap under their own beginning."""
    margin = " " * LABEL_WIDTH
    for number, line in enumerate(lines):
        yield textwrap.fill(
            line,
            width=LINE_WIDTH,
            initial_indent=margin if number else label.ljust(LABEL_WIDTH),
            subsequent_indent=margin + "  ",
        )


def _problem(plan: LaunchPlan) -> Iterator[str]:
    problem = plan.problem
    yield f"{plan.direction}, {problem.dtype.value}, {problem.mask} mask, on {problem.device}"
    yield (
        f"batch {problem.batch}, {problem.heads_q} query heads over {problem.heads_k} key heads"
        f" (group {problem.group})"
    )
    yield (
        f"{problem.seqlen_q} queries, {problem.seqlen_k} keys, head_dim {problem.head_dim},"
        f" head_dim_v {problem.head_dim_v}"
    )
    softcap = f", softcap {problem.softcap:g}" if problem.softcap else ""
    yield f"softmax_scale {problem.softmax_scale:.6g}{softcap}"
    pairs, all_pairs = problem.visible_pairs, problem.seqlen_q * problem.seqlen_k
    share = f" ({100 * pairs / all_pairs:.1f} %)" if all_pairs else ""
    yield f"visible pairs per head: {pairs:,} of {all_pairs:,}{share}"
    yield f"useful work: {problem.useful_flops(plan.direction) / 1e9:,.3f} GFLOP"


def _backends(plan: LaunchPlan) -> Iterator[str]:
    summaries = {backend.name: backend.summary for backend in BACKENDS}
    for name, answer in plan.answers:
        if name == plan.backend:
            yield f"{name:<6}taken: {summaries[name]}"
        elif answer:
            yield f"{name:<6}able too, but {plan.backend} comes first"
        else:
            yield f"{name:<6}no: {'; '.join(answer.reasons)}"


def _tile(call: KernelCall) -> Iterator[str]:
    config = call.spec.config
    yield (
        f"{config.tile_m} queries x {config.tile_n} keys, head dims padded to"
        f" {config.head_dim} and {config.head_dim_v}"
    )
    yield f"{config.stages_kv} stages of K and of V; P V takes P from {config.p_operand.value}"


def _roles(call: KernelCall, plan: LaunchPlan) -> Iterator[str]:
    config = call.spec.config
    rows = config.tile_m // config.consumer_warpgroups
    budget = registers(config, plan.arch)
    yield f"warpgroup 0: producer (TMA loads), {config.registers_producer} registers"
    yield (
        f"warpgroups 1-{config.consumer_warpgroups}: consumers of {rows} rows each (wgmma,"
        f" softmax, store), {config.registers_consumer} registers"
    )
    yield f"{config.threads} threads claim {budget.claimed} registers of {budget.pool}"


def _registers(call: KernelCall, plan: LaunchPlan) -> Iterator[str]:
    budget = registers(call.spec.config, plan.arch)
    yield (
        f"consumer thread: acc_S {budget.acc_S} + acc_O {budget.acc_O} + P {budget.P}"
        f" + overhead {budget.overhead} = {budget.total} of {budget.limit}"
    )


def _shared_memory(call: KernelCall, plan: LaunchPlan) -> Iterator[str]:
    budget = shared_memory(call.spec.config, plan.problem.dtype.itemsize)
    yield (
        f"Q/O {budget.q_and_o} + K {budget.k} + V {budget.v} + P {budget.p}"
        f" + barriers {budget.barriers}"
    )
    yield f"= {budget.total} B aligned, of {plan.arch.smem_bytes_per_block} B per block"


def _grid(call: KernelCall) -> Iterator[str]:
    x, y, z = call.grid
    yield f"{x} query tiles x {y} heads x {z} batch = {x * y * z} CTAs"


def _blocks(call: KernelCall, plan: LaunchPlan) -> Iterator[str]:
    problem, config = plan.problem, call.spec.config
    tiling = Tiling(problem.seqlen_q, problem.seqlen_k, config.tile_m, config.tile_n)
    totals = block_totals(problem.mask, tiling)
    yield (
        f"per head: {totals.visited} visited ({totals.unmasked} unmasked, {totals.masked} masked),"
        f" {totals.skipped} skipped"
    )
    computed = totals.visited * config.tile_m * config.tile_n
    yield f"{100 * problem.visible_pairs / computed:.1f} % of the computed scores are visible"
