"""Sizes up to the limits are planned; past them every reason has its number."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hopperflash.plan import arch_of, limits, make_plan, supports
from hopperflash.problem import AttnOptions
from tests.support.problems import Sizes, backward, packed_problem, problem

WINDOW = AttnOptions(window_size=(5, 5))
ARCHS = {"sm90": arch_of("sm_90a"), "sm80": arch_of("sm_80")}


def reasons(given, backend="sm90", direction="forward"):
    return supports(given, ARCHS[backend], direction, backend).reasons


LIMITS = {
    "heads": (lambda n: problem(Sizes(heads_q=n, heads_k=1)), limits.GRID_YZ_MAX),
    "batch": (lambda n: problem(Sizes(batch=n)), limits.GRID_YZ_MAX),
    "seqlen_q": (lambda n: problem(Sizes(seqlen_q=n)), limits.SEQLEN_MAX),
    "seqlen_k": (lambda n: problem(Sizes(seqlen_k=n)), limits.SEQLEN_MAX),
    "seqlen_q under": (lambda n: problem(Sizes(seqlen_q=n), WINDOW), limits.WINDOW_SEQLEN_MAX),
    "seqlen_k under": (lambda n: problem(Sizes(seqlen_k=n), WINDOW), limits.WINDOW_SEQLEN_MAX),
    "heads of packed": (
        lambda n: replace(packed_problem(9, 9, 3), heads_q=n, heads_k=1),
        limits.GRID_YZ_MAX,
    ),
    "total_q": (lambda n: packed_problem(n, 9, 3), limits.PACKED_ROWS_MAX),
    "total_k": (lambda n: packed_problem(9, n, 3), limits.PACKED_ROWS_MAX),
    "total_q under": (lambda n: packed_problem(n, 9, 3, WINDOW), limits.WINDOW_SEQLEN_MAX),
}


@pytest.mark.parametrize("backend", ARCHS)
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("name", LIMITS)
def test_up_to_a_limit_and_not_past_it(name, direction, backend):
    make, limit = LIMITS[name]
    assert reasons(make(limit), backend, direction) == ()
    (reason,) = reasons(make(limit + 1), backend, direction)
    assert reason.startswith(f"{backend}: {name.split()[0]} {limit + 1} exceeds {limit} (")
    if name.endswith("under"):
        assert "window" in reason


def test_tiles_of_packed_sequences_fit_the_grid():
    sequences = limits.GRID_X_MAX // 4
    (reason,) = reasons(packed_problem(64, 64, sequences))
    assert "tiles times heads" in reason and "grid x" in reason
    assert reasons(packed_problem(64, 64, sequences - 10)) == ()
    plan = make_plan(packed_problem(64, 64, sequences - 10), ARCHS["sm90"])
    assert max(call.grid[0] for call in plan.calls) <= limits.GRID_X_MAX


def test_the_smallest_tiles_count():
    given = replace(packed_problem(2**29, 9, 3), heads_q=128, head_dim=256, head_dim_v=256)
    (reason,) = reasons(given, "sm80", "backward")
    assert "tiles times heads" in reason and "grid x" in reason
    fits = replace(given, heads_q=126)
    assert reasons(fits, "sm80", "backward") == ()
    plan = make_plan(backward(fits), ARCHS["sm80"], "backward", "sm80")
    assert max(call.grid[0] for call in plan.calls) <= limits.GRID_X_MAX


def test_statistics_of_very_many_sequences_have_no_backward():
    """Each begins at a tile of its own, and rows are counted in 32 bits."""
    given = packed_problem(64, 64, 2**24)
    assert reasons(given) == ()
    (reason,) = reasons(given, direction="backward")
    assert reason.startswith("sm90: rows padded to tiles 2147483712 exceeds")


def test_numbers_the_kernels_cannot_scale_by():
    for scale, reason in (
        (0.0, "softmax_scale 0: its kernels take"),
        (-1.0, "softmax_scale -1: its kernels take"),
        (2.0**-127, "softmax_scale 5.87747e-39"),
        (2.0**127 * 1.5, "softmax_scale 2.55212e+38"),
    ):
        (found,) = reasons(problem(options=AttnOptions(softmax_scale=scale)))
        assert reason in found
    for scale in limits.SCALE_RANGE:
        assert reasons(problem(options=AttnOptions(softmax_scale=scale))) == ()


@pytest.mark.parametrize(
    ("scale", "softcap", "reason"),
    [
        (None, 2.0**127 * 1.5, "softcap 2.55212e+38"),
        (8.0, 2.0**-126, "softmax_scale / softcap 6.80565e+38"),
        (2.0**-10, 2.0**120, "softmax_scale / softcap 7.34684e-40"),
    ],
    ids=["softcap log2(e) overflows", "scores of 0 become NaN", "scores lose their digits"],
)
def test_caps_the_kernels_cannot_scale_by(scale, softcap, reason):
    options = AttnOptions(softmax_scale=scale, softcap=softcap)
    found = reasons(problem(options=options))
    assert any(reason in each for each in found)
    assert reasons(problem(options=AttnOptions(softmax_scale=1.0, softcap=2.0**120))) == ()


def test_caps_whose_slope_is_rounding_have_no_backward():
    least = problem(options=AttnOptions(softcap=limits.SOFTCAP_MIN))
    less = replace(least, softcap=limits.SOFTCAP_MIN / 2)
    assert reasons(least, direction="backward") == reasons(less) == ()
    (found,) = reasons(less, direction="backward")
    assert found.startswith("sm90: softcap 0.0078125: its backward takes 0.015625 and more")


def test_all_limits_are_listed_at_once():
    given = problem(Sizes(batch=2**16, seqlen_q=2**31, seqlen_k=2**31, heads_q=2**16))
    assert len(reasons(given)) == 4
