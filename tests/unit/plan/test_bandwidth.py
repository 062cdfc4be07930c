"""Shared-memory bandwidth of the tiles, against figures worked out by hand."""

from __future__ import annotations

import pytest

from hopperflash.plan.arch import arch_of
from hopperflash.plan.bandwidth import Gemm, tile_traffic
from hopperflash.plan.explain import explain
from hopperflash.plan.planner import make_plan
from hopperflash.plan.tiles_sm90 import (
    backward_config,
    backward_tile,
    forward_config,
    forward_tile,
)
from hopperflash.problem import MaskKind
from tests.support.problems import Sizes, problem


def test_one_gemm():
    """Two warpgroups of 64 rows, 8 steps of 16: each reads 64 x 16 of A and 128 x 16 of B."""
    gemm = Gemm("S", 128, 128, 128)
    assert gemm.bytes_read == 2 * 8 * (64 * 16 + 128 * 16) * 2
    assert gemm.tensor_clocks == 2 * 8 * 64
    assert Gemm("O", 128, 128, 128, a_in_registers=True).bytes_read == 2 * 8 * 128 * 16 * 2
    split = Gemm("S^T", 64, 64, 64, shares=2)
    assert split.bytes_read == 2 * 4 * (64 * 16 + 32 * 16) * 2
    assert split.tensor_clocks == 2 * 4 * 16


@pytest.mark.parametrize(
    ("head_dims", "mask", "tensor", "shared"),
    [
        ((64, 64), MaskKind.CAUSAL, 1536, 1216),
        ((128, 128), MaskKind.FULL, 2816, 2368),
        ((128, 128), MaskKind.CAUSAL, 2048, 1792),
        ((192, 128), MaskKind.FULL, 2560, 2304),
        ((192, 192), MaskKind.FULL, 2688, 2400),
        ((256, 256), MaskKind.FULL, 2560, 2432),
    ],
)
def test_forward_tiles_are_bound_by_the_tensor_cores(head_dims, mask, tensor, shared):
    traffic = tile_traffic(forward_config(forward_tile(*head_dims, mask), *head_dims), 2)
    assert (traffic.tensor_clocks, traffic.shared_clocks) == (tensor, shared)
    assert shared < tensor


@pytest.mark.parametrize(
    ("head_dim", "tensor", "shared"), [(64, 2560, 2816), (128, 2560, 2944), (256, 2560, 4352)]
)
def test_backward_tiles_are_bound_by_shared_memory(head_dim, tensor, shared):
    tile = backward_tile(head_dim, head_dim, MaskKind.FULL)
    traffic = tile_traffic(backward_config(tile, head_dim, head_dim), 2)
    assert (traffic.tensor_clocks, traffic.shared_clocks) == (tensor, shared)


def test_explain_says_what_bounds_a_tile():
    plan = make_plan(problem(Sizes(head_dim=128)), arch_of("sm_90a"), "backward")
    assert "tensor cores 2560" in " ".join(explain(plan).split())
