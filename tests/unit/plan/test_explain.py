"""The text people read holds every number the plan was made from."""

from __future__ import annotations

from hopperflash.plan import arch_of, explain, make_plan
from hopperflash.plan.budget import registers, shared_memory
from hopperflash.problem import AttnOptions
from tests.support.problems import Sizes, facts, problem, with_operand

SM90 = arch_of("sm_90a")


def words(text: str) -> str:
    """Text without its line breaks and indentation."""
    return " ".join(text.split())


def test_launch_is_explained():
    given = problem(Sizes(2, 1000, 1200, 8, 2, 128), AttnOptions(causal=True))
    plan = make_plan(given, SM90)
    (call,) = plan.calls
    config, text = call.spec.config, words(explain(plan))
    smem, regs = shared_memory(config, 2), registers(config, SM90)
    x, y, z = call.grid
    for fact in (
        "forward, bfloat16, causal mask",
        "8 query heads over 2 key heads (group 4)",
        "sm90 taken: wgmma and TMA",
        "sm80 no: its kernels are not written yet",
        "cpu no: arch is sm_90a, not cpu",
        plan.steps.reasons[0],
        f"{config.tile_m} queries x {config.tile_n} keys",
        f"{config.registers_consumer} registers",
        f"overhead {regs.overhead} = {regs.total} of {regs.limit}",
        f"= {smem.total} B aligned, of 232448 B per block",
        f"= {x * y * z} CTAs",
        "copies none",
        "workspaces none",
    ):
        assert words(fact) in text


def test_lines_fit_a_terminal():
    given = problem(options=AttnOptions(causal=True))
    strided = facts(2, 200, 4, 64, strides=(52800, 264, 66, 1))
    text = explain(make_plan(with_operand(given, "q", strided), SM90))
    assert "66 not a positive multiple of 8 elements" in words(text)
    assert max(map(len, text.splitlines())) < 80


def test_empty_and_cpu_plans_are_explained():
    assert "without a launch" in words(explain(make_plan(problem(Sizes(seqlen_k=0)), SM90)))
    text = words(explain(make_plan(problem(device="cpu"), arch_of("cpu"), "backward")))
    assert "cpu taken: exact streaming attention in torch" in text
    assert "sm90 no: arch cpu has no wgmma; its backward kernels are not written yet" in text
