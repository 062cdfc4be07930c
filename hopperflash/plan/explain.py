"""A launch plan in words and numbers, for people at a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from hopperflash.plan.backends import BACKENDS
from hopperflash.plan.explain_call import explain_call
from hopperflash.plan.launch_plan import LaunchPlan
from hopperflash.problem import AttnProblem, Direction

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
        sections += explain_call(call, plan)
    copies = [f"{copy.operand}: {copy.reason}" for copy in plan.copies]
    copies += [f"into {copy.operand}: {copy.reason}" for copy in plan.copies_back]
    if plan.calls or copies:
        sections.append(("copies", copies or ["none"]))
    if plan.calls:
        sections.append(("workspaces", list(_workspaces(plan))))
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
    heads = (
        f"{problem.heads_q} query heads over {problem.heads_k} key heads (group {problem.group})"
    )
    head_dims = f"head_dim {problem.head_dim}, head_dim_v {problem.head_dim_v}"
    if problem.is_packed:
        yield f"packed sequences: {problem.sequences}, {heads}"
        yield f"{problem.seqlen_q} rows of queries, {problem.seqlen_k} of keys, {head_dims}"
    else:
        yield f"batch {problem.batch}, {heads}"
        yield f"{problem.seqlen_q} queries, {problem.seqlen_k} keys, {head_dims}"
    softcap = f", softcap {problem.softcap:g}" if problem.softcap else ""
    yield f"softmax_scale {problem.softmax_scale:.6g}{softcap}"
    yield from _work(problem, plan.direction)
    if plan.direction == "backward":
        order = ", deterministic" if problem.deterministic else ""
        yield f"gradients: {', '.join(problem.gradients) or 'none'}{order}"


def _work(problem: AttnProblem, direction: Direction) -> Iterator[str]:
    if problem.is_packed:
        yield "visible pairs and useful work: by the lengths, which only the device reads"
        return
    pairs, all_pairs = problem.visible_pairs, problem.seqlen_q * problem.seqlen_k
    share = f" ({100 * pairs / all_pairs:.1f} %)" if all_pairs else ""
    yield f"visible pairs per head: {pairs:,} of {all_pairs:,}{share}"
    yield f"useful work: {problem.useful_flops(direction) / 1e9:,.3f} GFLOP"


def _backends(plan: LaunchPlan) -> Iterator[str]:
    summaries = {backend.name: backend.summary for backend in BACKENDS}
    for name, answer in plan.answers:
        if name == plan.backend:
            asked = ", as asked for" if plan.requested else ""
            yield f"{name:<6}taken{asked}: {summaries[name]}"
        elif answer:
            preference = "was asked for" if plan.requested else "comes first"
            yield f"{name:<6}able too, but {plan.backend} {preference}"
        else:
            yield f"{name:<6}no: {'; '.join(answer.reasons)}"


def _workspaces(plan: LaunchPlan) -> Iterator[str]:
    if not plan.workspaces:
        yield "none"
    for item in plan.workspaces:
        zeroed = ", zeroed" if item.zeroed else ""
        yield f"{item.name} {item.shape} {item.dtype}: {item.nbytes:,} B{zeroed}"
    if len(plan.workspaces) > 1:
        yield f"= {sum(item.nbytes for item in plan.workspaces):,} B"
