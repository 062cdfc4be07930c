"""Pairs of CTAs that load K and V together: who is paired, and why not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hopperflash.plan import arch_of, explain, make_plan
from hopperflash.plan.block_range import Tiling, key_block_range
from hopperflash.plan.clusters import l2_rate, sharing
from hopperflash.plan.config import ForwardConfig, Scheduler
from hopperflash.plan.cost import moved_bytes
from hopperflash.plan.feasibility import check
from hopperflash.plan.planner import supports
from hopperflash.problem import AttnOptions, AttnProblem, DType, MaskKind
from tests.support.problems import Sizes, problem

SM90 = arch_of("sm_90a")
CAUSAL = AttnOptions(causal=True)
LONG = Sizes(1, 8192, 8192, 16, 16, 128)


def config_of(given: AttnProblem) -> ForwardConfig:
    config = make_plan(given, SM90).calls[-1].spec.config
    assert isinstance(config, ForwardConfig)
    return config


@pytest.mark.parametrize("mask", [MaskKind.FULL, MaskKind.CAUSAL], ids=lambda mask: mask.value)
@pytest.mark.parametrize("head_dims", [(128, 128), (192, 128), (192, 192), (256, 256)])
def test_l2_is_at_ease_from_head_dim_128_on(head_dims, mask):
    head_dim, head_dim_v = head_dims
    sizes = replace(LONG, head_dim=head_dim, head_dim_v=head_dim_v)
    config = config_of(problem(sizes, AttnOptions(causal=mask is MaskKind.CAUSAL)))
    assert config.cluster_m == 2
    assert l2_rate(config, 2) <= 24.0 < l2_rate(replace(config, cluster_m=1), 2)
    assert check(config, SM90, DType.BFLOAT16)


@pytest.mark.parametrize(
    ("sizes", "options", "reason"),
    [
        (replace(LONG, head_dim=64), None, "B a clock of L2 are within reach"),
        (LONG, AttnOptions(window_size=(1000, 0)), "a window moves on"),
        (LONG, replace(CAUSAL, sm_margin=12), "a bounded grid"),
        # One tile alone; three, with a step of eight; and a diagonal before few keys.
        (replace(LONG, seqlen_q=100), None, "50.0 % would be idle"),
        (replace(LONG, seqlen_q=300), None, "25.0 % would be idle"),
        (replace(LONG, seqlen_q=1024, seqlen_k=1024), CAUSAL, "10.0 % would be idle"),
    ],
)
def test_who_is_not_paired_and_why(sizes, options, reason):
    plan = make_plan(problem(sizes, options), SM90)
    (call,) = plan.calls
    assert call.spec.config.cluster_m == 1
    assert reason in " ".join(explain(plan).split())


def test_nobody_is_paired_where_no_query_sees_a_key():
    given = problem(replace(LONG, seqlen_k=0))
    assert make_plan(given, SM90).calls == ()
    assert sharing(config_of(problem(LONG)), given) == (1, "none: no query sees a key")


def test_an_sm_alone_has_a_pair_at_a_time():
    plan = make_plan(problem(LONG), replace(SM90, sms=1))
    assert plan.calls[0].grid == (2, 1, 1)


def test_packed_sequences_are_not_paired():
    packed = replace(problem(replace(LONG, batch=1)), sequences=4)
    assert sharing(config_of(problem(LONG)), packed).ctas == 1


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        (replace(LONG, seqlen_q=4000, seqlen_k=5000), CAUSAL),
        (replace(LONG, seqlen_q=5000, seqlen_k=4000), CAUSAL),
        (replace(LONG, seqlen_q=2100), None),
        (Sizes(1, 3000, 2000, 8, 2, 192), CAUSAL),
    ],
)
def test_idle_steps_are_those_of_one_tile_alone(sizes, options):
    given = problem(sizes, options)
    config = config_of(given)
    tiling = Tiling(given.seqlen_q, given.seqlen_k, config.queries, config.tile_n)
    visited = [key_block_range(given.mask, m, tiling).visited for m in range(tiling.m_blocks)]
    visited += [0] * (len(visited) % 2)
    # Both walk down to block 0.
    steps = 2 * sum(max(visited[m : m + 2]) for m in range(0, len(visited), 2))
    idle = steps - sum(visited)
    assert config.cluster_m == 2
    assert f"{100 * idle / steps:.1f} % of their steps are idle" in sharing(config, given).reason


def test_a_grid_is_of_whole_clusters():
    odd = problem(replace(LONG, seqlen_q=8100 - 128), CAUSAL)
    (call,) = make_plan(odd, SM90).calls
    assert call.tiles == (63, 16, 1)
    assert call.grid == (64 * 8, 2, 1)  # eight heads take turns
    assert "= 1008 tiles for 1024 CTAs" in " ".join(explain(make_plan(odd, SM90)).split())


def test_pairs_stride_in_step():
    """An SM less than can be paired."""
    given, odd = problem(replace(LONG, seqlen_q=8100 - 128)), replace(SM90, sms=131)
    plan = make_plan(given, odd)
    (call,) = plan.calls
    assert (call.spec.config.scheduler, call.spec.config.cluster_m) == (Scheduler.PERSISTENT, 2)
    assert call.grid == (130, 1, 1)
    assert dict(plan.steps.scalars)["max_ctas"] == 130


@pytest.mark.parametrize(("seqlen", "pairs"), [(2048, False), (4096, False), (8192, True)])
def test_short_causal_tiles_are_taken_one_by_one_rather_than_in_pairs(seqlen, pairs):
    given = problem(Sizes(16384 // seqlen, seqlen, seqlen, 16, 16, 128), CAUSAL)
    plan = make_plan(given, SM90)
    config = plan.calls[0].spec.config
    expected = (Scheduler.SINGLE, 2) if pairs else (Scheduler.DYNAMIC, 1)
    assert (config.scheduler, config.cluster_m) == expected
    text = " ".join(explain(plan).split())
    assert ("more than pairs would" in text) is not pairs
    assert ("pairs of CTAs are worth more than tiles taken one by one" in text) is pairs


def test_a_pair_asks_l2_for_half_and_fills_as_much():
    pair = config_of(problem(LONG))
    alone, shared = moved_bytes(replace(pair, cluster_m=1), 2), moved_bytes(pair, 2)
    assert alone.l2 == alone.into_shared == 2 * 128 * 2 * 128
    assert shared == alone._replace(l2=alone.l2 // 2)


def test_clusters_that_cannot_be_are_refused():
    pair = config_of(problem(LONG))
    dynamic = replace(pair, scheduler=Scheduler.DYNAMIC)
    assert "take tiles one by one" in check(dynamic, SM90, DType.BFLOAT16).reasons[0]
    uneven = replace(pair, tile_n=112, cluster_m=4)
    assert "multiples of 8 rows" in check(uneven, SM90, DType.BFLOAT16).reasons[0]
    assert supports(problem(LONG), SM90)
