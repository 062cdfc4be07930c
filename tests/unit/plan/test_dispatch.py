"""Which backend takes a problem on which machine, and how a user asks for one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hopperflash.errors import InvalidArgument, UnsupportedProblem
from hopperflash.plan import (
    ARCHS,
    POperand,
    arch_of,
    arch_of_capability,
    explain,
    family,
    make_plan,
    planner,
    supports,
    tiles,
    tiles_sm80,
    tiles_sm90,
)
from hopperflash.plan.config import AccumulatorOrder, PostprocessConfig, PreprocessConfig
from hopperflash.plan.sm80 import SM80
from hopperflash.problem import AttnOptions
from tests.support.problems import Sizes, backward, facts, problem, with_operand

DIRECTIONS = ("forward", "backward")
AMPERE = arch_of("sm_80")


def words(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("arch", ARCHS, ids=lambda arch: arch.name)
def test_every_arch_has_its_backend(arch, direction):
    expected = {"cpu": "cpu", "sm_90a": "sm90"}.get(arch.name, "sm80")
    plan = make_plan(problem(), arch, direction)
    assert plan.backend == expected
    assert {call.spec.target for call in plan.calls} <= {arch.name}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dims", [(8, 8), (72, 40), (128, 128), (192, 128), (200, 256)])
@pytest.mark.parametrize("name", ["sm_80", "sm_86"])
def test_ampere_forward(name, head_dims, causal):
    given = problem(Sizes(3, 1000, 700, 6, 2, *head_dims), AttnOptions(causal=causal))
    plan = make_plan(given, arch_of(name))
    (call,) = plan.calls
    tile = tiles_sm80.forward_tile(*head_dims, given.mask.kind, arch_of(name))
    config = replace(tiles_sm80.forward_config(tile, *head_dims), group=3)
    assert (call.spec.ref, call.spec.config) == (SM80.forward, config)
    assert call.all_tiles == (-(-1000 // config.queries), 2, 3)
    assert tile.source in plan.steps.reasons[0]


def test_ampere_backward():
    given = problem(Sizes(3, 1000, 700, 6, 2, 192), AttnOptions(causal=True, deterministic=True))
    plan = make_plan(backward(given), AMPERE, "backward")
    before, main, after = plan.calls
    assert [call.spec.ref for call in plan.calls] == [
        family.PREPROCESS,
        SM80.backward,
        family.POSTPROCESS,
    ]
    config = main.spec.config
    assert config.deterministic
    assert main.all_tiles == (-(-700 // config.tile_n), 2, 3)
    padded = -(-1000 // config.tile_m) * config.tile_m
    assert {buffer.shape for buffer in plan.workspaces[:2]} == {(3, 6, padded)}
    # The kernels around it are Hopper's, compiled for another target and order of dQ.
    hopper = make_plan(backward(given), arch_of("sm_90a"), "backward")
    rows = AccumulatorOrder.ROWS
    assert before.spec.config == PreprocessConfig(config.tile_m, rows)
    assert [call.spec.ref for call in (before, after)] == [hopper.calls[i].spec.ref for i in (0, 2)]
    assert after.spec.config == PostprocessConfig(config.tile_m, rows)
    assert (before.operands, main.operands, after.operands) == tuple(
        call.operands for call in hopper.calls
    )


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_ampere_refuses_what_its_kernels_cannot_do(direction):
    options = AttnOptions(dropout_p=0.1, softmax_scale=0.0, alibi=True)
    reasons = supports(problem(options=options), AMPERE, direction, "sm80").reasons
    for reason in ("dropout_p 0.1", "softmax_scale 0", "alibi_slopes"):
        assert any(found.startswith("sm80: ") and reason in found for found in reasons)


def test_operands_cp_async_cannot_read_are_copied():
    strided = facts(2, 200, 4, 64, strides=(52800, 264, 66, 1))
    (copy,) = make_plan(with_operand(problem(), "q", strided), AMPERE).copies
    assert copy.reason.endswith("66 not a positive multiple of 8 elements (cp.async)")


@pytest.mark.parametrize(
    ("direction", "table", "row", "numbers"),
    [
        (
            "forward",
            "FORWARD_TILES",
            tiles_sm90.ForwardTile(64, 64, tiles.ANY, 192, 256, POperand.REGISTERS, "an edit"),
            "acc_S 128 + acc_O 32 + P 64 + overhead 24",
        ),
        (
            "backward",
            "BACKWARD_TILES",
            tiles_sm90.BackwardTile(64, 64, tiles.ANY, 192, 128, 2, 1, 2, "an edit"),
            "acc_dV 32 + acc_dK 32 + acc_S 96 + acc_dP 96 + overhead 24",
        ),
    ],
)
def test_what_hopper_cannot_do_ampere_takes(monkeypatch, direction, table, row, numbers):
    """A problem that the Hopper kernels refuse goes to the next backend, which says why."""
    monkeypatch.setattr(tiles_sm90, table, (row,))
    planner._plan.cache_clear()
    plan = make_plan(problem(), arch_of("sm_90a"), direction)
    planner._plan.cache_clear()
    assert plan.backend == "sm80"
    assert {call.spec.target for call in plan.calls} == {"sm_90a"}
    text = words(explain(plan))
    assert f"sm90 no: tile 192x{row.tile_n} at head_dim 64" in text
    assert numbers in text
    assert "sm80 taken: mma.sync and cp.async" in text


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_backend_can_be_asked_for(direction):
    plan = make_plan(problem(), arch_of("sm_90a"), direction, "sm80")
    assert (plan.backend, plan.requested) == ("sm80", "sm80")
    text = words(explain(plan))
    assert "sm80 taken, as asked for: mma.sync" in text
    assert "sm90 able too, but sm80 was asked for" in text


def test_asking_for_the_wrong_backend():
    with pytest.raises(UnsupportedProblem, match="backend sm90 does not compute this") as refused:
        make_plan(problem(), AMPERE, backend="sm90")
    assert refused.value.reasons == ("sm90: arch sm_80 has no wgmma",)
    assert supports(problem(), AMPERE, backend="sm90").reasons == refused.value.reasons
    with pytest.raises(InvalidArgument, match="'sm70': give one of sm90, sm80, cpu"):
        make_plan(problem(), AMPERE, backend="sm70")


def test_unlisted_members_of_a_generation():
    sm88 = arch_of_capability((8, 8))
    assert (sm88.name, sm88.smem_bytes_per_block) == ("sm_80", 101376)
    assert arch_of_capability((10, 7)).name == "sm_100"
    assert make_plan(problem(), sm88).calls[0].spec.target == "sm_80"


@pytest.mark.parametrize("capability", [(7, 5), (9, 1), (15, 0)])
def test_gpus_without_a_target(capability):
    found = "{}.{}".format(*capability)
    with pytest.raises(InvalidArgument, match=rf"{found}: .*sm_80.*sm_90a"):
        arch_of_capability(capability)


def test_explained():
    given = problem(Sizes(2, 1000, 1200, 8, 2, 192), AttnOptions(causal=True, deterministic=True))
    text = words(explain(make_plan(given, AMPERE)))
    for fact in (
        "32 queries of 4 heads x 64 keys, head dims padded to 192 and 192",
        "x 2 key heads x 2 batch",
        "2 stages of K and of V; Q K^T takes Q from registers, loaded once",
        "8 warps of 16 rows each; all of them load (cp.async), compute (mma.sync, softmax)",
        "thread, P V phase: acc_O 96 + Q 48 + P 16 + V 48 + overhead 24 = 232 of 255",
        "Q/O 49152 + K 49152 + V 49152 = 147456 B aligned, of 166912 B per block",
    ):
        assert fact in text
    text = words(explain(make_plan(backward(given), AMPERE, "backward")))
    for fact in (
        "2 stages of Q and of dO; dV and dK take P and dS from shared",
        "8 warps of 16 keys and 1/2 of the columns each",
        "thread, dQ phase:",
        "added up in fp32 by red.add; key tiles take turns in a fixed order: deterministic",
    ):
        assert fact in text


@pytest.mark.parametrize(
    ("name", "chained"), [("sm_80", False), ("sm_90a", True), ("sm_120a", True)]
)
def test_kernels_of_a_pass_overlap_from_hopper_on(name, chained):
    calls = make_plan(problem(Sizes()), arch_of(name), "backward").calls
    assert [call.spec.dependent for call in calls] == [False, *[chained] * (len(calls) - 1)]
