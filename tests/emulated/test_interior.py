"""Blocks that the mask does not cut are not masked: they cost less than a select per score."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

import hopperflash
from hopperflash.plan import LaunchPlan
from hopperflash.plan.block_range import (
    BlockTotals,
    Tiling,
    key_block_totals,
    query_block_totals,
)
from hopperflash.plan.config import ForwardConfig, ForwardConfigSm80

pytestmark = pytest.mark.emulated

QUERIES, KEYS, HEAD_DIM = 128, 896, 64
EXTRA = 512  # keys, a multiple of every tile's


class Setting(NamedTuple):
    """Keys and options of a problem."""

    keys: int
    options: dict[str, Any]


class Measured(NamedTuple):
    """Blocks of one launch, warp instructions that select, and what a mask takes for a block."""

    blocks: BlockTotals
    selects: int
    selects_of_mask: int


# Every query sees EXTRA keys more in the second problem, and its edges cut as many blocks.
SETTINGS = {
    "full": (Setting(KEYS - EXTRA, {}), Setting(KEYS, {})),
    "causal": (Setting(KEYS - EXTRA, {"causal": True}), Setting(KEYS, {"causal": True})),
    "window": (
        Setting(KEYS, {"window_size": (200, 9)}),
        Setting(KEYS, {"window_size": (200 + EXTRA, 9)}),
    ),
}


def _totals(plan: LaunchPlan, config: Any) -> BlockTotals:
    problem = plan.problem
    lengths = problem.seqlen_q, problem.seqlen_k
    if isinstance(config, (ForwardConfig, ForwardConfigSm80)):
        return key_block_totals(problem.mask, Tiling(*lengths, config.queries, config.tile_n))
    return query_block_totals(problem.mask, Tiling(*lengths, config.tile_m, config.tile_n))


def _measure(arch: str, direction: str, setting: Setting) -> Measured:
    """The direction's main kernel; a mask selects once per score, 32 of which are a warp's."""
    operands = [
        torch.randn(1, length, 1, HEAD_DIM).bfloat16().requires_grad_()
        for length in (QUERIES, setting.keys, setting.keys)
    ]
    plan = hopperflash.make_plan(*operands, arch=arch, direction=direction, **setting.options)
    (config,) = (call.spec.config for call in plan.calls if hasattr(call.spec.config, "tile_n"))
    with hopperflash.emulate(arch, hazards="basic") as run:
        out = hopperflash.flash_attn_func(*operands, **setting.options)
        if direction == "backward":
            out.sum().backward()
    part = {"forward": "_fwd_sm", "backward": "_bwd_sm"}[direction]
    (counters,) = (found for name, found in run.kernels.items() if part in name)
    selects_of_mask = config.tile_m * config.tile_n // 32
    return Measured(_totals(plan, config), counters["op:selp"], selects_of_mask)


@pytest.mark.parametrize("mask", SETTINGS)
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_interior_blocks_are_not_masked(arch: str, direction: str, mask: str) -> None:
    few, many = (_measure(arch, direction, setting) for setting in SETTINGS[mask])
    assert few.blocks.masked == many.blocks.masked
    extra = many.blocks.unmasked - few.blocks.unmasked
    assert extra >= 2
    assert many.selects - few.selects < extra * many.selects_of_mask
