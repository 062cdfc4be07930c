"""The Hopper forward kernel, executed through its real host code, against fp64."""

from __future__ import annotations

from typing import Any

import pytest

import hopperflash
from hopperflash.plan import LaunchPlan
from hopperflash.plan.block_range import Tiling, key_block_totals
from hopperflash.plan.budget import shared_memory
from hopperflash.plan.config import ForwardConfig
from hopperflash.plan.tiles import padded_head_dim
from hopperflash.runtime.emulation import SCHEDULES
from tests.support.cases import FORWARD_CASES, Case, check_forward, make_inputs

pytestmark = pytest.mark.emulated


def _params() -> list[Any]:
    """Cases that share a compiled kernel go to one worker, which compiles it once."""
    return [
        pytest.param(
            case,
            id=str(case),
            marks=pytest.mark.xdist_group(f"{case.dtype}-{padded_head_dim(case.head_dim)}"),
        )
        for case in FORWARD_CASES
    ]


def _plan(case: Case) -> tuple[LaunchPlan, ForwardConfig]:
    plan = hopperflash.make_plan(*make_inputs(case), arch="sm_90a", **case.options)
    config = plan.calls[0].spec.config
    assert isinstance(config, ForwardConfig)
    return plan, config


def _planned_flops(plan: LaunchPlan, config: ForwardConfig) -> int:
    problem = plan.problem
    tiling = Tiling(problem.seqlen_q, problem.seqlen_k, config.queries, config.tile_n)
    per_block = 2 * config.tile_m * config.tile_n * (config.head_dim + config.head_dim_v)
    blocks = key_block_totals(problem.mask, tiling).visited
    return problem.batch * problem.heads_q // config.group * blocks * per_block


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("case", _params())
def test_forward_matches_fp64(case: Case, schedule: str) -> None:
    with hopperflash.emulate("sm_90a", schedule=schedule, seed=1) as run:
        check_forward(case, hopperflash.flash_attn_func)
    assert run.hazards == []
    plan, config = _plan(case)
    (launch,) = run.launches
    assert launch.registers_set == (config.registers_producer, config.registers_consumer)
    assert launch.shared_bytes == shared_memory(config, 2).total
    assert run.counters["wgmma_flops"] == _planned_flops(plan, config)


@pytest.mark.xdist_group("bf16-64")
def test_rings_turn_many_times() -> None:
    """A barrier that expects one arrival too few drifts by one a turn, and deadlocks late."""
    with hopperflash.emulate("sm_90a", schedule="lazy") as run:
        check_forward(Case("ring", seqlen_q=64, seqlen_k=128 * 40), hopperflash.flash_attn_func)
    assert run.hazards == []
