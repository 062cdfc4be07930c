"""Who takes a problem, what is launched, and what a refusal says."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest

from hopperflash.errors import InvalidArgument, UnsupportedProblem
from hopperflash.plan import (
    Buffer,
    POperand,
    arch_of,
    family,
    make_plan,
    planner,
    supports,
    tiles,
    tiles_sm90,
)
from hopperflash.plan.backends import BACKENDS
from hopperflash.plan.config import Scheduler
from hopperflash.problem import AttnOptions
from tests.support.problems import Sizes, facts, problem, with_operand

DIRECTIONS = ("forward", "backward")
SM90, SM80, CPU = arch_of("sm_90a"), arch_of("sm_80"), arch_of("cpu")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [8, 64, 72, 128, 200, 256])
def test_hopper_forward(head_dim, causal):
    given = problem(Sizes(3, 1000, 700, 6, 2, head_dim), AttnOptions(causal=causal))
    plan = make_plan(given, SM90)
    (call,) = plan.calls
    tile = tiles_sm90.forward_tile(head_dim, head_dim, given.mask.kind)
    config = replace(
        tiles_sm90.forward_config(tile, head_dim, head_dim),
        group=3,
        cluster_m=2 if head_dim > 96 else 1,
        factors_on_fma=head_dim <= 64,
    )
    if not causal and -(-1000 // config.queries) * 2 * 3 > 132:
        config = replace(config, scheduler=Scheduler.PERSISTENT)
    assert plan.backend == "sm90"
    assert call.spec.config == config
    assert call.spec.signature == given.signature
    assert call.spec.target == "sm_90a"
    assert call.all_tiles == (-(-1000 // (config.tile_m // 3)), 2, 3)
    assert plan.copies == plan.workspaces == ()
    assert plan.results == (
        Buffer("out", (3, 1000, 6, head_dim), "bfloat16"),
        Buffer("lse", (3, 6, 1000), "float32"),
    )


def test_head_dims_of_the_forward_are_padded_apart():
    (call,) = make_plan(problem(Sizes(head_dim=72, head_dim_v=40)), SM90).calls
    assert (call.spec.config.head_dim, call.spec.config.head_dim_v) == (96, 64)


def test_plans_are_values():
    strided = facts(2, 200, 4, 64, strides=(52800, 264, 66, 1))
    given = with_operand(problem(), "q", strided)
    one = make_plan(given, SM90)
    planner._plan.cache_clear()
    other = make_plan(given, SM90)
    assert one.copies
    assert one is not other
    assert one == other
    assert hash(one) == hash(other)
    assert pickle.loads(pickle.dumps(one)) == one
    assert "ForwardSm90" in repr(one)


def test_lengths_do_not_change_the_kernel():
    specs = {
        make_plan(problem(Sizes(seqlen_q=sq, seqlen_k=sk)), SM90).calls[0].spec
        for sq, sk in ((1, 1), (128, 128), (1000, 77))
    }
    assert len(specs) == 1


@pytest.mark.parametrize(
    ("sizes", "options", "reason"),
    [
        (Sizes(), AttnOptions(dropout_p=0.1), "dropout_p 0.1"),
        (Sizes(), AttnOptions(alibi=True), "alibi_slopes"),
        (Sizes(), AttnOptions(return_attn_probs=True), "use return_lse=True"),
        (Sizes(), AttnOptions(softmax_scale=0.0), "softmax_scale 0"),
        (Sizes(), AttnOptions(softmax_scale=-1.0), "softmax_scale -1"),
        (Sizes(heads_q=65536, heads_k=1), None, "heads 65536 exceeds 65535"),
        (Sizes(batch=65536), None, "batch 65536 exceeds 65535"),
        (Sizes(seqlen_k=2**31), None, "seqlen_k 2147483648 exceeds"),
    ],
)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_hopper_refuses_each_with_its_own_reason(sizes, options, reason, direction):
    answer = sm90_answer(problem(sizes, options), direction=direction)
    assert len(answer.reasons) == 1
    assert reason in answer.reasons[0]


def sm90_answer(given, arch=SM90, direction="forward"):
    return BACKENDS[0].supports(given, arch, direction)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_deterministic_is_honoured(direction):
    assert sm90_answer(problem(options=AttnOptions(deterministic=True)), direction=direction)


def test_refusal_lists_every_backend():
    given = problem(options=AttnOptions(window_size=(3, 0), dropout_p=0.5, alibi=True))
    with pytest.raises(UnsupportedProblem, match="no backend computes this backward") as refused:
        make_plan(given, SM90, "backward")
    reasons = refused.value.reasons
    for backend in ("sm90", "sm80", "cpu"):
        mine = "\n".join(reason for reason in reasons if reason.startswith(f"{backend}: "))
        assert "dropout_p 0.5" in mine
        assert "alibi_slopes" in mine
    assert "cpu: arch is sm_90a, not cpu" in reasons
    assert supports(given, SM90, "backward").reasons == reasons
    assert isinstance(refused.value, NotImplementedError)


def test_infeasible_tile_is_refused_with_its_numbers(monkeypatch):
    row = tiles_sm90.ForwardTile(64, 64, tiles.ANY, 192, 256, POperand.REGISTERS, "an edit")
    monkeypatch.setattr(tiles_sm90, "FORWARD_TILES", (row,))
    planner._plan.cache_clear()
    with pytest.raises(UnsupportedProblem, match="tile 192x256 at head_dim 64") as refused:
        make_plan(problem(), SM90, backend="sm90")
    assert "acc_S 128 + acc_O 32 + P 64 + overhead 24" in str(refused.value)


def test_infeasible_backward_tile_is_refused_with_its_numbers(monkeypatch):
    row = tiles_sm90.BackwardTile(64, 64, tiles.ANY, 192, 128, 2, 1, 2, "an edit")
    monkeypatch.setattr(tiles_sm90, "BACKWARD_TILES", (row,))
    planner._plan.cache_clear()
    with pytest.raises(UnsupportedProblem, match="tile 192x128 at head_dim 64") as refused:
        make_plan(problem(), SM90, "backward", "sm90")
    assert "acc_dV 32 + acc_dK 32 + acc_S 96 + acc_dP 96 + overhead 24" in str(refused.value)
    assert make_plan(problem(), SM90)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    "options",
    [
        AttnOptions(causal=True),
        AttnOptions(window_size=(3, 5)),
        AttnOptions(softcap=30.0),
        AttnOptions(softmax_scale=-1.0, deterministic=True),
    ],
)
def test_cpu_takes_what_it_computes(options, direction):
    plan = make_plan(problem(Sizes(head_dim=72, head_dim_v=40), options), CPU, direction)
    assert plan.backend == "cpu"
    assert plan.calls == ()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (AttnOptions(dropout_p=0.1), "cpu: dropout_p 0.1"),
        (AttnOptions(alibi=True), "cpu: alibi_slopes"),
        (AttnOptions(return_attn_probs=True), "cpu: return_attn_probs"),
    ],
)
def test_cpu_refuses(options, reason):
    answer = supports(problem(options=options), CPU)
    assert not answer
    assert any(found.startswith(reason) for found in answer.reasons)


def test_cpu_wants_cpu_tensors():
    answer = supports(problem(device="cuda:0"), CPU)
    assert "cpu: the tensors are on cuda:0, not on the cpu" in answer.reasons


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("sizes", [Sizes(batch=0), Sizes(seqlen_q=0), Sizes(seqlen_k=0)])
def test_empty_problems_launch_nothing(sizes, direction):
    plan = make_plan(problem(sizes), SM90, direction)
    assert plan.backend == "sm90"
    assert plan.calls == ()
    assert "without a launch" in plan.steps.reasons[0]


def test_unknown_direction():
    with pytest.raises(InvalidArgument, match="direction is 'sideways'"):
        make_plan(problem(), SM90, "sideways")


SHAPE = (2, 200, 4, 64)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"strides": (51200, 256, 64, 2)}, "last stride 2"),
        ({"strides": (52800, 264, 66, 1)}, "66 not a positive multiple of 8"),
        ({"strides": (51200, 256, 0, 1)}, "0 not a positive multiple of 8"),
        ({"alignment": 8}, "aligned to 8 bytes"),
    ],
)
def test_operands_tma_cannot_read_are_copied(change, reason):
    operand = replace(facts(*SHAPE), **change)
    plan = make_plan(with_operand(problem(), "q", operand), SM90)
    (copy,) = plan.copies
    assert copy.operand == "q"
    assert reason in copy.reason


@pytest.mark.parametrize(
    "operand",
    [
        facts(*SHAPE, strides=(51200, 64, 12800, 1)),
        facts(*SHAPE, strides=(64, 128, 25600, 1)),
        facts(1, 200, 1, 64, strides=(3, 64, 5, 1)),
        facts(*SHAPE, alignment=16),
    ],
    ids=["heads before sequence", "batch inside", "odd strides of length 1", "16-byte base"],
)
def test_operands_tma_reads_in_place(operand):
    assert family.read_refusal(operand, 2, "TMA") is None
