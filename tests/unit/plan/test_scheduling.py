"""Grids that leave SMs free, and what is said of them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from hopperflash.errors import InvalidArgument, UnsupportedProblem
from hopperflash.plan import arch_of, explain, make_plan, supports
from hopperflash.plan.config import MainConfig, Scheduler
from hopperflash.plan.launch_plan import KernelCall, LaunchPlan
from hopperflash.plan.limits import TILES_MAX
from hopperflash.plan.scheduling import ctas_per_sm
from hopperflash.problem import AttnOptions
from tests.support.problems import Sizes, backward, packed_problem, problem

SIZES = Sizes(batch=4, seqlen_q=4096, seqlen_k=4096, heads_q=16, heads_k=8)


def main_call(plan: LaunchPlan) -> KernelCall:
    (call,) = (call for call in plan.calls if isinstance(call.spec.config, MainConfig))
    return call


@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("packed", [False, True])
def test_a_margin_bounds_the_grid_of_the_main_kernel_alone(arch, direction, packed):
    spec, margin = arch_of(arch), AttnOptions(sm_margin=20)
    plans = []
    for options in (AttnOptions(), margin):
        given = packed_problem(9000, 9000, 3, options) if packed else problem(SIZES, options)
        given = given if direction == "forward" else backward(given)
        plans.append(make_plan(given, spec, direction))
    plain, bounded = map(main_call, plans)
    config = bounded.spec.config
    assert plain.spec.config.scheduler is Scheduler.SINGLE
    assert plain.tiles is None
    assert config.scheduler is Scheduler.PERSISTENT
    each = ctas_per_sm(config, spec, 2)
    most = (spec.sms - 20) * each
    assert bounded.tiles == plain.grid
    assert bounded.grid == (min(math.prod(plain.grid), most), 1, 1)
    assert dict(plans[1].steps.scalars)["max_ctas"] == most
    others = [[call.grid for call in plan.calls if call is not main_call(plan)] for plan in plans]
    assert others[0] == others[1]
    assert plain.spec.signature == bounded.spec.signature


def test_few_tiles_get_a_cta_each_from_the_same_kernel():
    """Lengths ask for no other kernel."""
    options = AttnOptions(sm_margin=20)
    short, long = (
        main_call(make_plan(problem(Sizes(seqlen_q=seqlen), options), arch_of("sm_90a")))
        for seqlen in (100, 100_000)
    )
    assert short.spec == long.spec
    assert short.grid == (math.prod(short.tiles), 1, 1)
    assert long.grid == (112, 1, 1)


@pytest.mark.parametrize("margin", [-1, True, 1.0, "8", None])
def test_what_is_no_number_of_sms_is_refused(margin):
    with pytest.raises(InvalidArgument, match="sm_margin is"):
        problem(options=AttnOptions(sm_margin=margin))


def test_a_margin_of_all_sms_is_refused_with_their_number():
    given = problem(options=AttnOptions(sm_margin=132), device="cuda")
    (hopper, *_) = supports(given, arch_of("sm_90a"), backend="sm90").reasons
    assert hopper == "sm90: sm_margin 132 leaves none of the 132 SMs to attention"
    pcie = replace(arch_of("sm_90a"), sms=114)
    with pytest.raises(UnsupportedProblem, match="none of the 114 SMs"):
        make_plan(replace(given, sm_margin=120), pcie)
    assert supports(replace(given, sm_margin=113), pcie)


def test_numbers_of_tiles_fit_their_counters():
    rows = 32 * (TILES_MAX // 65535 + 1)
    given = problem(Sizes(1, rows, 64, 65535, 65535), AttnOptions(sm_margin=1))
    (reason,) = supports(given, arch_of("sm_90a"), backend="sm90").reasons
    assert "tiles" in reason and str(TILES_MAX) in reason
    assert supports(replace(given, sm_margin=0), arch_of("sm_90a"), backend="sm90")


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_scheduler_is_explained(direction):
    given = problem(SIZES, AttnOptions(sm_margin=12))
    given = given if direction == "forward" else backward(given)
    plan = make_plan(given, arch_of("sm_90a"), direction)
    text = " ".join(explain(plan).split())
    call = main_call(plan)
    assert "persistent: sm_margin 12 of 132 SMs leaves 120 x 1 CTAs = 120" in text
    assert f"120 CTAs stride over {math.prod(call.tiles)} tiles" in text
    assert f"= {math.prod(call.tiles)} tiles for 120 CTAs" in text
    plain = make_plan(replace(given, sm_margin=0), arch_of("sm_90a"), direction)
    assert "single-tile: a CTA computes one tile" in " ".join(explain(plain).split())


def test_the_cpu_says_that_it_has_no_sms():
    plan = make_plan(problem(options=AttnOptions(sm_margin=12)), arch_of("cpu"))
    assert plan.backend == "cpu"
    assert "sm_margin 12: the cpu has no SMs to leave free" in explain(plan)
