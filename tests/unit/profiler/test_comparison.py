"""Counted bytes and busy units beside the models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hopperflash.analysis.tiled_traffic import L2
from hopperflash.cli.explain import ExplainOptions, plan_of
from hopperflash.plan import arch_of
from hopperflash.profiler import ncu
from hopperflash.profiler.comparison import Bytes, Comparison, of_profiles

RAW = Path(__file__).parent / "recorded" / "ncu_raw.csv"


def plans(**changed):
    sizes = {"seqlen": 256, "head_dim": 64, **changed}
    return [
        plan_of(ExplainOptions(**sizes, direction=direction))
        for direction in ("forward", "backward")
    ]


@pytest.fixture(scope="module")
def compared() -> tuple[Comparison, ...]:
    return of_profiles(ncu.read(RAW), plans(), None)


def row(kernel: Comparison, name: str) -> Bytes:
    return next(found for found in kernel.bytes if found.name == name)


def test_every_kernel_has_the_model_of_its_own_launch(compared):
    assert [row(kernel, "loaded by SMs").ratio for kernel in compared] == [1, 1, 1, 1]
    forward, _, backward, _ = compared
    assert row(forward, "stored by SMs").ratio == pytest.approx(69632 / 67584)
    assert row(forward, "of it by TMA") == Bytes("of it by TMA", 229376)
    # Behind the 50 MiB of L2 that the report names; the median of two launches.
    assert row(forward, "read from DRAM") == Bytes("read from DRAM", 132096, 131072)
    assert row(backward, "read from DRAM").ratio == pytest.approx(201728 / 200704)
    # A model of 0 bytes, or none, has no ratio.
    assert Bytes("", 1, 0).ratio is None and Bytes("", None, 1).ratio is None


def test_the_bounding_unit_of_the_model_is_at_100(compared):
    forward = {unit.name: unit for unit in compared[0].units}
    assert max(unit.model for unit in forward.values()) == 100
    assert forward["tensor"].busy == pytest.approx(31.0)
    assert all(unit.model is None for unit in compared[1].units)


def test_facts_and_stalls_of_a_launch(compared):
    forward = compared[0]
    assert forward.nanoseconds == 9200
    assert forward.facts["registers"] == 128
    assert forward.facts["warps' wgmma"] == 1536
    assert forward.facts["instructions on local memory"] == 0
    assert forward.stalls[0] == ("gmma", 2.93)


def test_another_problem_shows_in_the_ratio():
    forward = of_profiles(ncu.read(RAW), plans(seqlen=512), None)[0]
    assert row(forward, "loaded by SMs").ratio < 0.5


def test_the_usual_cache_stands_in_for_one_that_is_not_named():
    profiles = [
        replace(one, metrics={n: v for n, v in one.metrics.items() if "device" not in n})
        for one in ncu.read(RAW)
    ]
    without = of_profiles(profiles, plans(), None)[0]
    assert row(without, "read from DRAM").model is None
    small = of_profiles(profiles, plans(), L2(0, 1))[0]
    usual = of_profiles(profiles, plans(), L2.of(arch_of("sm_90a")))[0]
    models = [row(found, "read from DRAM").model for found in (small, usual)]
    assert models[0] > models[1] == 131072


def test_packed_sequences_have_no_model_of_bytes():
    packed = [plan_of(ExplainOptions(seqlens="200,56", head_dim=64))]
    forward, *rest = of_profiles(ncu.read(RAW), packed, None)
    assert {found.model for found in forward.bytes} == {None}
    assert all(unit.model is not None for unit in forward.units)
    assert all(unit.model is None for kernel in rest for unit in kernel.units)
