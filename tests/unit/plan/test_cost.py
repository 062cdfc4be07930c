"""The cost model of the tiles, against figures worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hopperflash.plan.arch import arch_of
from hopperflash.plan.cost import Gemm, moved_bytes, tile_step, with_cheapest_factors
from hopperflash.plan.explain import explain
from hopperflash.plan.planner import make_plan
from hopperflash.plan.tiles_sm90 import (
    backward_config,
    backward_tile,
    forward_config,
    forward_tile,
)
from hopperflash.plan.units import UnitClocks
from hopperflash.problem import MaskKind
from tests.support.problems import Sizes, problem


def forward(head_dims, mask=MaskKind.CAUSAL):
    return forward_config(forward_tile(*head_dims, mask), *head_dims)


def backward(head_dim):
    return backward_config(backward_tile(head_dim, head_dim, MaskKind.FULL), head_dim, head_dim)


def test_one_gemm():
    """Two warpgroups of 64 rows, 8 steps of 16: each reads 64 x 16 of A and 128 x 16 of B."""
    gemm = Gemm("S", 128, 128, 128)
    assert gemm.instructions == 2 * 8
    assert gemm.bytes_read == 2 * 8 * (64 * 16 + 128 * 16) * 2
    assert gemm.tensor_clocks == 2 * 8 * 64
    assert Gemm("O", 128, 128, 128, a_in_registers=True).bytes_read == 2 * 8 * 128 * 16 * 2
    split = Gemm("S^T", 64, 64, 64, shares=2)
    assert split.bytes_read == 2 * 4 * (64 * 16 + 32 * 16) * 2
    assert split.tensor_clocks == 2 * 4 * 16


@pytest.mark.parametrize(
    ("head_dims", "mask", "tensor", "shared", "l2", "bound"),
    [
        ((64, 64), MaskKind.CAUSAL, 1536, 1216 + 48, 1024, "tensor cores"),
        ((128, 128), MaskKind.FULL, 2048, 1792 + 32, 2048, "tensor cores"),
        ((128, 128), MaskKind.CAUSAL, 2048, 1792 + 32, 2048, "tensor cores"),
        ((192, 128), MaskKind.FULL, 2560, 2304 + 32, 2560, "tensor cores"),
        ((192, 192), MaskKind.FULL, 2688, 2400 + 32, 2688, "tensor cores"),
        ((256, 256), MaskKind.FULL, 2560, 2432 + 32, 2560, "tensor cores"),
    ],
)
def test_forward_tiles(head_dims, mask, tensor, shared, l2, bound):
    """Shared memory: operands and fills, and four shuffles a warp."""
    units = tile_step(forward(head_dims, mask), 2).units
    assert (units.tensor, units.shared, units.l2) == (tensor, shared, l2)
    assert units.bound.unit == bound


@pytest.mark.parametrize(
    ("head_dim", "tensor", "shared", "l2"),
    [
        (64, 2560, 2560 + 32 * 8, 2048),
        (128, 2560, 2560 + 16 * 8, 2048),
        (192, 2880, 4128 + 4 * 8, 3072),
    ],
)
def test_backward_tiles_are_bound_by_shared_memory(head_dim, tensor, shared, l2):
    """Operands, fills, dS and dQ, and the row statistics each warp reads."""
    units = tile_step(backward(head_dim), 2).units
    assert (units.tensor, units.shared, units.l2) == (tensor, shared, l2)
    assert units.bound == ("shared memory", shared)


def test_few_keys_ask_most_of_l2():
    units = tile_step(backward(256), 2).units
    assert units.bound == ("L2", (2 * 64 * 256 * 2 + 64 * 256 * 4) // 32)
    assert units.shared == 3840 + 8 * 8


def test_a_warpgroup_that_computes_dQ_alone_reads_dS_once():
    alone, together = backward(128), replace(backward(128), dq_warpgroups=2)
    alone, together = tile_step(alone, 2), tile_step(together, 2)
    assert together.shared_bytes - alone.shared_bytes == 64 * 128 * 2
    assert together.units.tensor == alone.units.tensor
    assert together.instructions - alone.instructions == 4


def test_instructions_of_a_forward_step():
    """64 scores, 64 outputs and 2 rows a thread; 16 wgmma a warpgroup."""
    step = tile_step(forward((128, 128)), 2)
    thread = step.thread
    assert (thread.mufu, thread.fma, thread.alu, thread.lsu) == (66, 3 * 64, 96, 4)
    assert step.instructions == thread.total + 16
    assert step.instructions_per_score == step.instructions / 64
    units = step.units
    assert (units.mufu, units.fma, units.alu) == (66 * 8 * 2, 3 * 64 * 2, 96 * 2 * 2)
    assert units.issue == 2 * step.instructions


def test_instructions_of_a_backward_step():
    """64 scores and 32 values of dQ a thread; 32 columns have two statistics each, in pairs."""
    step = tile_step(backward(64), 2)
    assert (step.thread.mufu, step.thread.fma, step.thread.alu) == (64, 3 * 64, 64)
    assert step.thread.lsu == 32 + 64 / 8 + 32 / 4


def test_what_is_not_computed_costs_nothing():
    full, narrow = backward(128), replace(backward(128), gradients=("dv",))
    assert tile_step(narrow, 2).units.tensor == tile_step(full, 2).units.tensor * 3 // 5
    assert moved_bytes(full, 2).l2 - moved_bytes(narrow, 2).l2 == 64 * 128 * 4
    assert moved_bytes(full, 2).out_of_shared == 0


def test_the_longest_unit_bounds():
    units = UnitClocks(tensor=5, mufu=9, issue=1, fma=0, alu=0, shared=9, l2=2)
    assert units.bound == ("MUFU", 9)
    assert units.l2_demand == 2 / 9
    assert replace(units, l2=18).l2_demand == 2


@pytest.mark.parametrize("head_dims", [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)])
def test_factors_leave_the_mufu_where_it_binds(head_dims):
    config = replace(forward(head_dims, MaskKind.CAUSAL), factors_on_fma=False)
    chosen = with_cheapest_factors(config, 2)
    bound = tile_step(config, 2).units.bound
    assert chosen.factors_on_fma == (bound.unit == "MUFU")
    if chosen.factors_on_fma:
        assert bound.clocks == 1584
        assert tile_step(chosen, 2).units.bound == ("tensor cores", 1536)


@pytest.mark.parametrize(
    ("direction", "facts"),
    [
        ("forward", ("clocks of a key block: tensor cores 2048", "bound by tensor cores; 16.0 B")),
        (
            "backward",
            ("clocks of a query block: tensor cores 2560", "bound by shared memory; 24.4 B"),
        ),
    ],
)
def test_explain_says_what_bounds_a_tile(direction, facts):
    plan = make_plan(problem(Sizes(head_dim=128)), arch_of("sm_90a"), direction)
    text = " ".join(explain(plan).split())
    for fact in facts:
        assert fact in text
    config = next(c.spec.config for c in plan.calls if hasattr(c.spec.config, "tile_n"))
    assert f"{tile_step(config, 2).instructions:.0f} instructions per thread" in text
