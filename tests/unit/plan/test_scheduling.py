"""Grids that leave SMs free, and what is said of them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from hopperflash.errors import InvalidArgument, UnsupportedProblem
from hopperflash.plan import arch_of, explain, make_plan, supports
from hopperflash.plan.config import MainConfig, Scheduler
from hopperflash.plan.launch_plan import Buffer, KernelCall, LaunchPlan
from hopperflash.plan.limits import TILES_MAX
from hopperflash.plan.scheduling import ctas_per_sm
from hopperflash.problem import AttnOptions
from tests.support.problems import Sizes, backward, packed_problem, problem

SM90 = arch_of("sm_90a")
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
    # Capped: the tile is the same with and without a margin.
    for options in (AttnOptions(softcap=5.0), replace(margin, softcap=5.0)):
        given = packed_problem(9000, 9000, 3, options) if packed else problem(SIZES, options)
        given = given if direction == "forward" else backward(given)
        plans.append(make_plan(given, spec, direction))
    plain, bounded = map(main_call, plans)
    config = bounded.spec.config
    takes = direction == "forward" and arch == "sm_90a" and packed
    assert config.scheduler is (Scheduler.DYNAMIC if takes else Scheduler.PERSISTENT)
    each = ctas_per_sm(config, spec, 2)
    most = (spec.sms - 20) * each
    assert bounded.tiles == plain.all_tiles
    assert bounded.grid == (min(math.prod(plain.all_tiles), most), 1, 1)
    assert dict(plans[1].steps.scalars)["max_ctas"] == most
    others = [[call.grid for call in plan.calls if call is not main_call(plan)] for plan in plans]
    assert others[0] == others[1]
    assert plain.spec.signature == bounded.spec.signature


WAVE = 132  # tiles that run at once


def scheduler_of(tiles: int, options: AttnOptions | None = None, **sizes: int) -> Scheduler:
    """Of a forward of so many tiles of one head, or packed if `sequences` are given."""
    if "sequences" in sizes:
        given = packed_problem(128 * tiles, 128 * tiles, sizes["sequences"], options)
    else:
        given = problem(Sizes(1, 192 * tiles, 192 * tiles, 1, 1), options)
    return main_call(make_plan(given, arch_of("sm_90a"))).spec.config.scheduler


def test_equal_tiles_are_strided_over_from_the_second_wave_on():
    assert scheduler_of(WAVE) is Scheduler.SINGLE
    assert scheduler_of(WAVE + 1) is Scheduler.PERSISTENT


@pytest.mark.parametrize(
    "options",
    [AttnOptions(causal=True), AttnOptions(window_size=(512, 512))],
    ids=["causal", "window"],
)
def test_unequal_tiles_are_taken_once_that_pays_for_the_counter(options):
    assert scheduler_of(2 * WAVE, options) is Scheduler.SINGLE
    assert scheduler_of(3 * WAVE, options) is Scheduler.DYNAMIC


def test_packed_tiles_are_unequal_under_any_mask():
    assert scheduler_of(4 * WAVE, sequences=3) is Scheduler.DYNAMIC


def test_a_dynamic_kernel_has_a_counter_that_begins_at_zero():
    plan = make_plan(problem(Sizes(4, 8192, 8192, 8, 8), AttnOptions(causal=True)), SM90)
    (call,) = plan.calls
    assert call.operands[-7] == "tiles_taken"
    assert plan.workspaces == (Buffer("tiles_taken", (1,), "int32", zeroed=True),)
    assert call.grid == (132, 1, 1)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(
    ("seqlen", "swizzle"),
    # 2/3 of 50 MiB hold 34952 rows of 512 bytes of K and V twice; of 1024 of Q, dO and dQ once.
    [(1024, (16, 16)), (8192, (8, 4)), (12000, (4, 2)), (100_000, (1, 1))],
)
def test_as_many_heads_take_turns_as_l2_holds(direction, seqlen, swizzle):
    given = problem(Sizes(1, seqlen, seqlen, 16, 16, 128), AttnOptions(causal=True))
    given = given if direction == "forward" else backward(given)
    plan = make_plan(given, SM90, direction)
    expected = swizzle[direction == "backward"]
    assert dict(plan.steps.scalars)["head_swizzle"] == expected
    call = main_call(plan)
    if call.spec.config.scheduler is Scheduler.SINGLE:
        blocks, heads, batch = call.all_tiles
        assert call.grid == (blocks * expected, heads // expected, batch)
    assert (f"{expected} heads take turns" in " ".join(explain(plan).split())) == (expected > 1)


@pytest.mark.parametrize(
    ("options", "direction"),
    [
        (AttnOptions(), "forward"),
        (AttnOptions(window_size=(100, 0)), "forward"),
        (AttnOptions(causal=True, deterministic=True), "backward"),
    ],
)
def test_heads_stay_apart_where_tiles_are_alike_or_wait(options, direction):
    given = problem(Sizes(1, 2048, 2048, 16, 16, 128), options)
    given = given if direction == "forward" else backward(given)
    assert dict(make_plan(given, SM90, direction).steps.scalars)["head_swizzle"] == 1


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
    words = (
        "persistent: 132 SMs" if direction == "forward" else "single-tile: a CTA computes one tile"
    )
    assert words in " ".join(explain(plain).split())


def test_the_cpu_says_that_it_has_no_sms():
    plan = make_plan(problem(options=AttnOptions(sm_margin=12)), arch_of("cpu"))
    assert plan.backend == "cpu"
    assert "sm_margin 12: the cpu has no SMs to leave free" in explain(plan)
