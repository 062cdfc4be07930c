"""Pairs of CTAs that load K and V, or Q and dO, together: results, bytes, tensor work, order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import hopperflash
from hopperflash.analysis.tiled_traffic import tiled_traffic
from hopperflash.emulator import EmulationRun
from hopperflash.plan import LaunchPlan, arch_of, clusters, planner
from hopperflash.plan.block_range import Tiling, key_block_totals
from hopperflash.plan.config import ForwardConfig
from hopperflash.runtime.emulation import SCHEDULES, EmulationSession, resumed
from tests.support.cases import Case, check_forward, make_inputs
from tests.support.gradient_cases import BackwardCase, check_backward, gradients_of, make_cotangents
from tests.support.pairs import pairs_wherever_they_can_be

pytestmark = [pytest.mark.emulated, pytest.mark.xdist_group("clusters")]

D128 = {"head_dim": 128, "head_dim_v": 128}
CASES = (
    # Two tiles, whose keys differ by a block at the diagonal.
    Case("pair", seqlen_q=256, seqlen_k=300, causal=True, **D128),
    # The third tile is alone, and the first sees no key: neither of its cluster does.
    Case("odd", seqlen_q=300, seqlen_k=130, causal=True, **D128),
    # A pair of which one sees keys; heads in the rows of a tile.
    Case("none", "fp16", seqlen_q=250, seqlen_k=70, heads_q=2, causal=True, **D128),
    Case("batch", batch=2, seqlen_q=130, seqlen_k=260, heads_q=2, heads_k=2, **D128),
    # A group that does not fit into the rows.
    Case("group", seqlen_q=140, seqlen_k=80, heads_q=13, **D128),
    Case("capped", "fp16", seqlen_q=140, seqlen_k=200, softcap=5.0, **D128),
    Case("latent", seqlen_q=140, seqlen_k=200, causal=True, head_dim=192, head_dim_v=128),
    Case("ragged", seqlen_q=200, seqlen_k=230, causal=True, head_dim=192, head_dim_v=192),
    Case("wide", seqlen_q=140, seqlen_k=170, causal=True, head_dim=256, head_dim_v=256),
)
ORDERED = CASES[:3]

D256 = {"head_dim": 256, "head_dim_v": 256}
BACKWARD_CASES = (
    # Two pairs of key tiles, of which a tile passes over two blocks that the other sees.
    BackwardCase("diagonal", seqlen_q=256, seqlen_k=256, causal=True, **D256),
    # The third tile is alone.
    BackwardCase("odd", seqlen_q=100, seqlen_k=150, heads_q=2, causal=True, **D256),
    # Of some pairs nobody sees a key; fewer columns than the tile has.
    BackwardCase("none", seqlen_q=70, seqlen_k=300, causal=True, head_dim=200, head_dim_v=256),
    BackwardCase("batch", batch=2, seqlen_q=130, seqlen_k=128, heads_q=4, heads_k=2, **D256),
    BackwardCase("capped", seqlen_q=140, seqlen_k=100, softcap=5.0, causal=True, **D256),
    BackwardCase("wide", seqlen_q=140, seqlen_k=200, causal=True, **D256),
    # Tiles pass over blocks before their own and after them; the fifth is alone.
    BackwardCase("band", seqlen_q=250, seqlen_k=270, window=(100, 20), **D256),
    # Keys before and past all windows, in pairs with such as are seen.
    BackwardCase("ends", "fp16", seqlen_q=200, seqlen_k=390, window=(30, 30), **D256),
    BackwardCase("past", seqlen_q=400, seqlen_k=200, window=(30, 0), **D256),
)


def _plan(case: Case) -> tuple[LaunchPlan, ForwardConfig]:
    plan = hopperflash.make_plan(*make_inputs(case), arch="sm_90a", **case.options)
    config = plan.calls[0].spec.config
    assert isinstance(config, ForwardConfig)
    return plan, config


def _flops(case: Case, config: ForwardConfig) -> int:
    """Of the tiles that are seen, whoever else loads them."""
    tiling = Tiling(case.seqlen_q, case.seqlen_k, config.queries, config.tile_n)
    blocks = key_block_totals(case.mask, tiling).visited * case.batch * case.heads_q
    per_block = 2 * config.tile_m * config.tile_n * (config.head_dim + config.head_dim_v)
    return blocks // config.group * per_block


def _loaded(run: EmulationRun) -> int:
    return run.counters["tma_load_bytes"] + run.counters["global_load_bytes"]


def _params() -> list[Any]:
    """Each case once, and some in every order."""
    chosen = [(case, schedule) for case in ORDERED for schedule in SCHEDULES]
    chosen += [(case, "random") for case in CASES if case not in ORDERED]
    return [pytest.param(*pair, id=f"{pair[0]}-{pair[1]}") for pair in chosen]


@pytest.mark.parametrize(("case", "schedule"), _params())
def test_pairs_match_fp64(case: Case, schedule: str) -> None:
    with pairs_wherever_they_can_be():
        plan, config = _plan(case)
        with hopperflash.emulate("sm_90a", schedule=schedule, seed=1) as run:
            check_forward(case, hopperflash.flash_attn_func)
    assert config.cluster_m == 2
    assert run.hazards == []
    (launch,) = run.launches
    assert launch.cluster == (2, 1, 1)
    assert launch.grid == plan.calls[0].grid
    assert run.counters["wgmma_flops"] == _flops(case, config)
    assert _loaded(run) == tiled_traffic(plan).asked.loaded


def _backward_params() -> list[Any]:
    """Each case once, and the first in every order."""
    first, *others = BACKWARD_CASES
    chosen = [(first, schedule) for schedule in SCHEDULES] + [(case, "random") for case in others]
    return [pytest.param(*pair, id=f"{pair[0]}-{pair[1]}") for pair in chosen]


@pytest.mark.parametrize(("case", "schedule"), _backward_params())
def test_pairs_of_key_tiles_match_fp64(case: BackwardCase, schedule: str) -> None:
    with (
        pairs_wherever_they_can_be(),
        hopperflash.emulate("sm_90a", schedule=schedule, seed=1) as run,
    ):
        check_backward(case, hopperflash.flash_attn_func)
    assert run.hazards == []
    (launch,) = (info for info in run.launches if "bwd_sm90" in info.kernel_name)
    assert "cluster2" in launch.kernel_name
    assert launch.cluster == (2, 1, 1)


def test_pairs_of_key_tiles_load_half(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tiles that all queries see: each loads half of Q and dO, and all row statistics; and
    those of the forward half of K and V."""
    case = BackwardCase("half", seqlen_q=192, seqlen_k=128, **D256)
    loaded = []
    for at_ease in (24.0, 1e6):
        for kind in clusters.L2_AT_EASE:
            monkeypatch.setitem(clusters.L2_AT_EASE, kind, at_ease)
        with pairs_wherever_they_can_be(), hopperflash.emulate("sm_90a") as run:
            gradients_of(
                case, hopperflash.flash_attn_func, make_inputs(case), make_cotangents(case)
            )
        loaded.append(_loaded(run))
    paired, alone = loaded
    assert alone - paired == (192 + 128) * (256 + 256) * 2


def test_pairs_load_half_and_compute_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four tiles of which all see all keys, and so do their clusters."""
    case = Case("half", seqlen_q=512, seqlen_k=200, **D128)
    results, loaded = [], []
    for at_ease in (24.0, 32.0):
        monkeypatch.setitem(clusters.L2_AT_EASE, ForwardConfig, at_ease)
        planner._plan.cache_clear()
        with hopperflash.emulate("sm_90a") as run:
            results.append(hopperflash.flash_attn_func(*make_inputs(case), **case.options))
        loaded.append(_loaded(run) - 512 * 128 * 2)
    monkeypatch.undo()
    planner._plan.cache_clear()
    assert loaded == [2 * 2 * 200 * 128 * 2, 4 * 2 * 200 * 128 * 2]
    for paired, alone in zip(*results, strict=True):
        assert torch.equal(paired, alone)


def test_pairs_walk_in_step() -> None:
    """Five tiles of each of three heads, in pairs, by two pairs of CTAs; one has two of them."""
    case = Case("walk", seqlen_q=600, seqlen_k=300, heads_q=3, heads_k=3, **D128)
    results = []
    for sms in (132, 4):
        session = EmulationSession(replace(arch_of("sm_90a"), sms=sms), "random", seed=0)
        run = session.run
        with pairs_wherever_they_can_be(), resumed(session):
            results.append(hopperflash.flash_attn_func(*make_inputs(case), **case.options))
        assert run.hazards == []
        assert run.launches[0].cluster == (2, 1, 1)
    assert "persistent" in run.launches[0].kernel_name
    assert run.launches[0].grid == (4, 1, 1)
    for paired, walked in zip(*results, strict=True):
        assert torch.equal(paired, walked)


def test_rings_of_pairs_turn_many_times() -> None:
    """A barrier that expects one arrival too few drifts by one a turn, and deadlocks late."""
    case = Case("ring", seqlen_q=256, seqlen_k=128 * 40, causal=True, **D128)
    with hopperflash.emulate("sm_90a", schedule="lazy") as run:
        check_forward(case, hopperflash.flash_attn_func)
    assert run.hazards == []
    assert run.launches[0].cluster == (2, 1, 1)
