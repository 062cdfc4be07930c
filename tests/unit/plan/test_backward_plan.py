"""The launches of a Hopper backward: who reads and writes what, grids, workspaces, results."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest

from hopperflash.plan import (
    NOTHING,
    Buffer,
    PostprocessConfig,
    PreprocessConfig,
    arch_of,
    family,
    make_plan,
    planner,
    sm90,
    tiles_sm90,
)
from hopperflash.plan.config import AccumulatorOrder, BackwardConfig
from hopperflash.problem import GRADIENTS, AttnOptions, MaskKind
from tests.support.problems import Sizes, backward, facts, packed_problem, problem

SCALARS = ("softmax_scale", "softcap", "window_left", "window_right", "max_ctas", "head_swizzle")
SM90 = arch_of("sm_90a")
SIZES = Sizes(3, 1000, 700, 6, 2, 128, 96)
GIVEN = problem(SIZES, AttnOptions(causal=True))


def plan_of(given):
    return make_plan(given, SM90, "backward")


@pytest.mark.parametrize(
    ("options", "gradients", "plain"),
    [
        (AttnOptions(causal=True), GRADIENTS, True),
        (AttnOptions(sm_margin=4), GRADIENTS, True),
        (AttnOptions(deterministic=True), GRADIENTS, True),
        (AttnOptions(deterministic=True, sm_margin=4), GRADIENTS, False),
        (AttnOptions(), ("dk", "dv"), False),
        (AttnOptions(softcap=5.0), GRADIENTS, False),
    ],
)
def test_what_takes_more_registers_gets_another_tile(options, gradients, plain):
    given = backward(problem(Sizes(head_dim=192, head_dim_v=128), options), gradients)
    config = plan_of(given).calls[1].spec.config
    assert (config.head_dim, config.head_dim_v) == (192, 128)
    assert (config.tile_m, config.tile_n) == ((48, 128) if plain else (64, 96))


@pytest.mark.parametrize(
    ("options", "gradients", "plain"),
    [
        (AttnOptions(), GRADIENTS, True),
        (AttnOptions(sm_margin=4), GRADIENTS, False),
        (AttnOptions(deterministic=True), GRADIENTS, False),
    ],
)
def test_packed_sequences_take_registers_too(options, gradients, plain):
    given = backward(packed_problem(900, 900, 3, options), gradients)
    configs = [call.spec.config for call in plan_of(given).calls]
    (config,) = (config for config in configs if isinstance(config, BackwardConfig))
    assert config.tile_m == (128 if plain else 112)


@pytest.mark.parametrize(("deterministic", "rows"), [(False, 48), (True, 64)])
def test_columns_that_do_not_exist_take_registers_in_order(deterministic, rows):
    options = AttnOptions(deterministic=deterministic)
    given = backward(problem(Sizes(head_dim=160, head_dim_v=128), options))
    assert plan_of(given).calls[1].spec.config.tile_m == rows


def test_three_launches():
    plan = plan_of(backward(GIVEN))
    before, main, after = plan.calls
    tile = tiles_sm90.backward_tile(128, 96, MaskKind.CAUSAL)
    assert plan.backend == "sm90"
    assert [call.spec.ref for call in plan.calls] == [
        family.PREPROCESS,
        sm90.SM90.backward,
        family.POSTPROCESS,
    ]
    assert main.spec.config == tiles_sm90.backward_config(tile, 128, 96)
    assert (main.spec.config.head_dim, main.spec.config.head_dim_v) == (128, 96)
    assert main.spec.signature == GIVEN.signature
    assert {call.spec.target for call in plan.calls} == {"sm_90a"}
    # 1000 queries in tiles of 64 are 1024 rows.
    assert before.grid == after.grid == (16, 6, 3)
    assert main.all_tiles == (6, 2, 3)
    assert before.spec.config == PreprocessConfig(64, AccumulatorOrder.FRAGMENTS)
    assert after.spec.config == PostprocessConfig(64, AccumulatorOrder.FRAGMENTS)
    assert before.operands == (
        *("out", "dout", "lse", "dlse", "lse_log2", "delta", "dq_acc"),
        NOTHING,
    )
    assert main.operands == (
        *("q", "k", "v", "dout", "lse_log2", "delta", "dq_acc", "dq_turn", "dk", "dv"),
        NOTHING,
        *SCALARS,
    )
    assert after.operands == ("dq_acc", "dq", NOTHING, "softmax_scale")


def test_workspaces_and_results():
    plan = plan_of(backward(GIVEN))
    assert plan.workspaces == (
        Buffer("lse_log2", (3, 6, 1024), "float32"),
        Buffer("delta", (3, 6, 1024), "float32"),
        Buffer("dq_acc", (3, 6, 16, 64 * 128), "float32"),
        Buffer("dq_turn", (1, 1, 1), "int32"),
    )
    assert plan.results == (
        Buffer("dq", (3, 1000, 6, 128), "bfloat16"),
        Buffer("dk", (3, 700, 2, 128), "bfloat16"),
        Buffer("dv", (3, 700, 2, 96), "bfloat16"),
    )
    assert [buffer.nbytes for buffer in plan.workspaces] == [73728, 73728, 9437184, 4]
    assert plan.results[2].nbytes == 3 * 700 * 2 * 96 * 2


@pytest.mark.parametrize("head_dim", range(8, 257, 8))
def test_every_operand_is_defined_once(head_dim):
    plan = plan_of(backward(problem(Sizes(head_dim=head_dim))))
    given = {"q", "k", "v", "out", "lse", "dout", "dlse", NOTHING, *SCALARS}
    made = [buffer.name for buffer in (*plan.workspaces, *plan.results)]
    used = {name for call in plan.calls for name in call.operands}
    assert len(set(made)) == len(made)
    assert used == given | set(made)


def test_deterministic_takes_turns():
    given = problem(SIZES, AttnOptions(causal=True, deterministic=True))
    plan = plan_of(backward(given))
    free = plan_of(backward(GIVEN))
    assert plan.calls[1].spec.config == replace(free.calls[1].spec.config, deterministic=True)
    assert plan.workspaces[:3] == free.workspaces[:3]
    assert plan.workspaces[3] == Buffer("dq_turn", (3, 6, 16), "int32", zeroed=True)
    assert (plan.calls[0], plan.calls[2]) == (free.calls[0], free.calls[2])


def test_without_dq_nothing_needs_an_order():
    given = problem(SIZES, AttnOptions(causal=True, deterministic=True))
    without = plan_of(backward(given, ("dk", "dv")))
    assert without.calls == plan_of(backward(GIVEN, ("dk", "dv"))).calls
    assert not without.workspaces[3].zeroed


@pytest.mark.parametrize(
    ("gradients", "written"),
    [
        (("dq",), ("k", "v")),
        (("dk",), ("dk", "v")),
        (("dv",), ("k", "dv")),
        (("dk", "dv"), ("dk", "dv")),
        (("dq", "dv"), ("k", "dv")),
    ],
)
def test_only_needed_gradients_are_computed(gradients, written):
    plan = plan_of(backward(GIVEN, gradients))
    before, main, *after = plan.calls
    needs_dq = "dq" in gradients
    zeroed = AccumulatorOrder.FRAGMENTS if needs_dq else None
    assert before.spec.config == PreprocessConfig(main.spec.config.tile_m, zeroed)
    assert main.spec.config.gradients == gradients
    assert main.operands[8:10] == written
    assert len(after) == int(needs_dq)
    assert tuple(buffer.name for buffer in plan.results) == gradients
    assert any(", ".join(gradients) in reason for reason in plan.steps.reasons)


def test_no_gradient_launches_nothing():
    plan = plan_of(backward(GIVEN, ()))
    assert plan.calls == plan.results == plan.workspaces == ()
    assert "no gradient" in plan.steps.reasons[0]


@pytest.mark.parametrize(
    "strides",
    [(0, 0, 0, 0), (96, 96, 96, 0), (1000 * 6 * 96, 1, 1000 * 96, 1000)],
    ids=["expanded", "expanded columns", "transposed"],
)
def test_dout_is_copied_where_tma_cannot_read_it(strides):
    (copy,) = plan_of(backward(GIVEN, dout=facts(3, 1000, 6, 96, strides=strides))).copies
    assert copy.operand == "dout"
    assert "TMA" in copy.reason


def test_dout_in_another_order_is_read_in_place():
    heads_first = facts(3, 1000, 6, 96, strides=(6 * 1000 * 96, 96, 1000 * 96, 1))
    assert plan_of(backward(GIVEN, dout=heads_first)).copies == ()


def test_lengths_and_masks_change_as_few_kernels_as_they_can():
    def specs(seqlens, causal):
        given = problem(Sizes(2, *seqlens, 4, 2, 64), AttnOptions(causal=causal))
        return [call.spec for call in plan_of(backward(given)).calls]

    full = specs((200, 300), False)
    assert specs((1, 1000), False) == full
    causal = specs((200, 300), True)
    assert causal[1] != full[1]
    assert (causal[0], causal[2]) == (full[0], full[2])


def test_plans_are_values():
    given = backward(problem(options=AttnOptions(deterministic=True)))
    one = plan_of(given)
    planner._plan.cache_clear()
    other = plan_of(given)
    assert one is not other
    assert one == other
    assert hash(one) == hash(other)
    assert pickle.loads(pickle.dumps(one)) == one
    assert "BackwardSm90" in repr(one)
