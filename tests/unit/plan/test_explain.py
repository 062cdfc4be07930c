"""The text people read holds every number the plan was made from."""

from __future__ import annotations

import pytest

from hopperflash.plan import arch_of, explain, make_plan
from hopperflash.plan.budget import registers, shared_memory
from hopperflash.problem import AttnOptions, with_result
from tests.support.problems import (
    Sizes,
    backward,
    facts,
    packed_problem,
    problem,
    with_operand,
)

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
    x, y, z = call.all_tiles
    for fact in (
        "forward, bfloat16, causal mask",
        "8 query heads over 2 key heads (group 4)",
        "sm90 taken: wgmma and TMA",
        "sm80 able too, but sm90 comes first",
        "cpu no: arch is sm_90a, not cpu",
        plan.steps.reasons[0],
        f"{config.queries} queries of 4 heads x {config.tile_n} keys",
        f"{config.registers_consumer} registers",
        f"overhead {regs.overhead} = {regs.total} of {regs.limit}",
        f"= {smem.total} B aligned, of 232448 B per block",
        f"= {x * y * z} CTAs",
        "copies none",
        "workspaces none",
    ):
        assert words(fact) in text


def test_backward_is_explained():
    options = AttnOptions(causal=True, deterministic=True)
    given = problem(Sizes(2, 1000, 1200, 8, 2, 128), options)
    plan = make_plan(backward(given), SM90, "backward")
    config = plan.calls[1].spec.config
    smem, regs = shared_memory(config, 2), registers(config, SM90)
    text = words(explain(plan))
    for fact in (
        "backward, bfloat16, causal mask",
        "gradients: dq, dk, dv, deterministic",
        plan.steps.reasons[0],
        "BackwardPreprocess for sm_90a",
        "delta = rowsum(dO * O) - dLSE; LSE in base 2 zeros into dq_acc",
        "16 tiles of 64 rows x 8 heads x 2 batch = 256 CTAs of 128 threads",
        "BackwardSm90 for sm_90a",
        "64 queries x 128 keys, head dims padded to 128 and 128",
        "2 stages of Q and of dO; dV and dK take P and dS from registers",
        "warpgroup 0: warp 0 loads (TMA), 24 registers",
        "warpgroups 1-2: consumers of 64 keys each (wgmma, softmax, store), 240 registers",
        "warpgroup 1 computes dQ and adds it to global memory",
        f"GEMM phase: {regs.peak} + overhead 24 = {regs.total} of 240",
        f"softmax phase: {regs.phases[0]} + overhead",
        f"{smem} = {smem.total} B aligned, of 232448 B per block",
        "10 key tiles x 2 key heads x 2 batch = 40 CTAs",
        "per query head: 104 visited (80 unmasked, 24 masked), 56 skipped",
        "key tiles take turns in a fixed order: deterministic",
        "dK, dV GQA: summed over the 4 query heads of a group in registers, written once;"
        " no fp32 accumulators",
        "BackwardPostprocess for sm_90a",
        "dQ = softmax_scale * dq_acc, in the input dtype",
        "dq_acc (2, 8, 16, 8192) float32: 8,388,608 B",
        "delta (2, 8, 1024) float32: 65,536 B",
        "dq_turn (2, 8, 16) int32: 1,024 B, zeroed",
        f"= {sum(buffer.nbytes for buffer in plan.workspaces):,} B",
    ):
        assert words(fact) in text


@pytest.mark.parametrize(
    ("head_dims", "facts"),
    [
        (
            (192, 128),
            (
                "48 queries x 128 keys",
                "every consumer has some of 3 parts of 64 head dims of dQ^T = K^T dS^T and adds it",
                "dQ phase: acc_dV 64 + acc_dK 96 + acc_dQ 48",
            ),
        ),
        (
            (192, 192),
            (
                "64 queries x 96 keys",
                "dV and dK take P and dS from shared; queries are the rows of S, head dims those of"
                " dV^T and dK^T",
                "consumers of 48 keys each",
            ),
        ),
        (
            (256, 256),
            (
                "consumers of 64 keys and 1/2 of the columns each",
                "2 CTAs with neighbouring tiles load each block once, half of it each: 25.2 B a"
                " clock of L2, not 33.6",
            ),
        ),
    ],
)
def test_backwards_say_how_they_split_the_work(head_dims, facts):
    plan = make_plan(backward(problem(Sizes(1, 8192, 8192, 16, 16, *head_dims))), SM90, "backward")
    text = words(explain(plan))
    for fact in facts:
        assert fact in text, fact


def test_a_backward_says_only_what_it_does():
    given = backward(problem(Sizes(heads_q=2, heads_k=2, head_dim=256)), ("dv",))
    text = words(explain(make_plan(given, SM90, "backward")))
    assert "gradients: dv backends" in text
    assert "only dv asked for" in text
    assert "warpgroup 0: warp 0 loads (TMA)" in text
    assert "consumers of 64 keys and 1/2 of the columns each" in text
    assert "dV summed in registers, written once" in text
    assert "GEMM phase: acc_dV 64" in text
    for absent in ("red.add", "adds it", "zeros into", "BackwardPostprocess", "GQA", "dK,"):
        assert absent not in text
    free = words(explain(make_plan(backward(problem()), SM90, "backward")))
    assert "in whatever order the key tiles come" in free
    assert "zeroed" not in free


def test_lines_fit_a_terminal():
    given = problem(options=AttnOptions(causal=True))
    strided = facts(2, 200, 4, 64, strides=(52800, 264, 66, 1))
    text = explain(make_plan(with_operand(given, "q", strided), SM90))
    assert "66 not a positive multiple of 8 elements" in words(text)
    text += explain(make_plan(backward(given), SM90, "backward"))
    assert max(map(len, text.splitlines())) < 80


def test_empty_and_cpu_plans_are_explained():
    assert "without a launch" in words(explain(make_plan(problem(Sizes(seqlen_k=0)), SM90)))
    text = words(explain(make_plan(problem(device="cpu"), arch_of("cpu"), "backward")))
    assert "cpu taken: exact streaming attention in torch" in text
    assert "sm90 no: arch cpu has no wgmma" in text


def test_windows_and_caps_are_explained():
    options = AttnOptions(window_size=(256, 0), softcap=30.0)
    given = problem(Sizes(1, 4096, 4096, 2, 2, 128), options)
    text = words(explain(make_plan(given, SM90)))
    assert "window (left 256, right 0) mask" in text
    assert "softcap 30" in text
    assert "visible pairs per head: 1,019,776 of 16,777,216 (6.1 %)" in text
    assert "per head: 93 visited (31 unmasked, 62 masked), 931 skipped" in text
    text = words(explain(make_plan(backward(given), SM90, "backward")))
    assert "window (left 256, right 0) mask" in text
    assert "per query head: " in text


def test_packed_sequences_are_explained_without_their_lengths():
    given = packed_problem(1000, 1200, 7, AttnOptions(causal=True), seqused=True)
    plan = make_plan(given, SM90)
    text = words(explain(plan))
    tiles = (1000 + (7 + 2) * 95) // 96
    for fact in (
        "packed sequences: 7, 4 query heads over 2 key heads (group 2)",
        "1000 rows of queries, 1200 of keys, head_dim 64",
        "by the lengths, which only the device reads",
        "TileTable for sm_90a",
        "lists the tiles of 96 queries from the lengths, longest sequences first",
        "a CTA of 256 threads for each of 1 tables",
        f"at most {tiles} query tiles x 2 key heads = {2 * tiles} CTAs",
        "K/V blocks those with a visible pair, by the lengths of each sequence",
        f"tiles_q ({tiles}, 8) int32",
    ):
        assert fact in text
    assert "GFLOP" not in text
    text = words(explain(make_plan(given, SM90, "backward")))
    for fact in ("tiles of 128 keys", "each of 2 tables", "x 2 key heads = ", "tiles_k ("):
        assert fact in text


def test_folded_heads_are_explained():
    text = words(explain(make_plan(problem(Sizes(1, 60, 1000, 6, 2, 128)), SM90)))
    assert "queries of 3 heads x" in text
    assert "2 query tiles x 2 key heads x 1 batch = 4 CTAs" in text
    assert "per key head: " in text


def test_results_that_cannot_be_written_in_place_are_named():
    transposed = facts(2, 200, 4, 64, strides=(51200, 256, 1, 4))
    plan = make_plan(with_result(problem(), "out", transposed), SM90)
    assert (plan.copies, [copy.operand for copy in plan.copies_back]) == ((), ["out"])
    assert "copies into out: last stride 4, TMA wants 1" in words(explain(plan))
    heads_first = facts(2, 200, 4, 64, strides=(51200, 64, 12800, 1))
    plan = make_plan(with_result(problem(), "out", heads_first), SM90)
    assert plan.copies == plan.copies_back == ()
    assert "copies none" in words(explain(plan))
    on_cpu = make_plan(with_result(problem(), "out", heads_first), arch_of("cpu"))
    assert "copies into out: torch computes it" in words(explain(on_cpu))
