"""The tolerance rule against hand-computed numbers, and the cases it judges."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hopperflash.reference import low_precision_attention, materialized_attention
from tests.support.cases import (
    DTYPES,
    FORWARD_CASES,
    HEAD_DIMS,
    Case,
    check_forward,
    expected,
    make_inputs,
)
from tests.support.tolerance import assert_close, tolerance

REF = torch.tensor([[1.0, 2.0], [0.5, -4.0]], dtype=torch.float64)
LOW = REF + torch.tensor([[0.01, 0.0], [0.0, 0.0]])


def nudged(index: tuple[int, int], by: float) -> Tensor:
    out = REF.clone()
    out[index] += by
    return out


def test_bound_is_twice_the_error_of_the_low_precision_formula() -> None:
    deviation = tolerance(nudged((1, 1), 0.015), REF, LOW)
    assert deviation.max_error == pytest.approx(0.015)
    assert deviation.max_bound == pytest.approx(0.02, rel=1e-4)
    assert deviation.rms_error == pytest.approx(0.015 / 2)
    assert deviation.rms_bound == pytest.approx(0.01, rel=1e-4)
    assert deviation.worst == (1, 1)
    assert deviation.ok


def test_max_bound_catches_one_element_and_names_it() -> None:
    with pytest.raises(AssertionError, match=r"max error 2\.5\d*e-02 >  bound 2\.0\d*e-02") as info:
        assert_close(nudged((1, 0), 0.025), REF, REF + 0.01, name="dq")
    assert str(info.value).startswith("dq (2, 2)")
    assert re.search("rms error .* <= bound", str(info.value))
    assert "worst at (1, 0): 0.525, reference 0.5, low precision 0.51" in str(info.value)


def test_factor_widens_the_bound() -> None:
    assert_close(nudged((1, 0), 0.025), REF, LOW, factor=3.0)


def test_rms_bound_catches_an_error_spread_over_all_elements() -> None:
    with pytest.raises(AssertionError, match=r"rms error .* >  bound"):
        assert_close(REF + 0.015, REF, LOW)
    assert tolerance(REF + 0.015, REF, LOW).max_error < tolerance(REF, REF, LOW).max_bound


def test_round_off_term_is_that_of_fp32() -> None:
    ref = torch.tensor([1.0, 5.0], dtype=torch.float64)
    bound = tolerance(ref, ref, ref).max_bound
    assert 0.0 < bound < 2e-6
    assert_close(ref + bound / 2, ref, ref)
    with pytest.raises(AssertionError):
        assert_close(ref + 2 * bound, ref, ref)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nonfinite_elements_must_agree_before_any_error_counts(value: float) -> None:
    ref = REF.clone()
    ref[0, 1] = -math.inf
    if value == -math.inf:
        assert_close(ref.clone(), ref, LOW)
        return
    out = ref.clone()
    out[0, 1] = value
    with pytest.raises(AssertionError, match=r"differ at 1 of 4; first at \(0, 1\): .* of -inf"):
        assert_close(out, ref, LOW)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nonfinite_result_where_the_reference_is_finite_fails(value: float) -> None:
    out = REF.clone()
    out[1, 0] = value
    with pytest.raises(AssertionError, match=r"differ at 1 of 4; first at \(1, 0\)"):
        assert_close(out, REF, LOW)


def test_meaningless_comparisons_are_refused() -> None:
    with pytest.raises(ValueError, match="shapes differ"):
        tolerance(REF[0], REF, LOW)
    with pytest.raises(ValueError, match="compute it in float32"):
        tolerance(REF, REF.bfloat16(), LOW)
    with pytest.raises(ValueError, match="overflows"):
        tolerance(REF, REF, LOW * math.inf)


def test_empty_results_are_close() -> None:
    empty = torch.empty(0, 3)
    assert assert_close(empty, empty, empty).worst is None


def test_case_names_are_unique() -> None:
    repeated = [name for name, count in Counter(map(str, FORWARD_CASES)).items() if count > 1]
    assert not repeated


def test_cases_cover_every_head_dim_dtype_and_mask() -> None:
    covered = {(case.head_dim, case.dtype, case.causal) for case in FORWARD_CASES}
    assert covered >= {(d, t, c) for d in HEAD_DIMS for t in DTYPES for c in (False, True)}


def test_cases_stay_small_enough_to_emulate() -> None:
    assert max(case.tiles for case in FORWARD_CASES) <= 16
    assert sum(case.tiles for case in FORWARD_CASES) <= 350


def test_large_magnitude_reaches_scores_that_overflow_exp() -> None:
    case = next(case for case in FORWARD_CASES if case.magnitude > 1)
    q, k, _ = make_inputs(case)
    scores = torch.einsum("bqhd,bkhd->bhqk", q.float(), k.float()) * case.softmax_scale
    assert 100 < scores.max() < 150
    assert -150 < scores.min() < -100


def test_inputs_depend_on_the_seed_alone() -> None:
    case = Case("seeded")
    assert torch.equal(make_inputs(case, 1).q, make_inputs(case, 1).q)
    assert not torch.equal(make_inputs(case, 1).q, make_inputs(case, 2).q)


CASE = Case("judged", batch=2, heads_q=2, seqlen_q=65, seqlen_k=64, causal=True)


def rounded_reference(q: Tensor, k: Tensor, v: Tensor, /, **options: Any) -> tuple[Tensor, Tensor]:
    out, lse = materialized_attention(
        q, k, v, CASE.mask, softmax_scale=options["softmax_scale"], softcap=options["softcap"]
    )
    return out.to(q.dtype), lse.float()


def test_the_rounded_reference_passes() -> None:
    check_forward(CASE, rounded_reference)


@pytest.mark.parametrize(
    "wrong",
    [
        {"softmax_scale": CASE.softmax_scale * 1.02},
        {"softmax_scale": CASE.softmax_scale, "heads": (1, 0)},
        {"softmax_scale": CASE.softmax_scale, "causal": False},
        {"softmax_scale": CASE.softmax_scale, "base": 2.0},
    ],
    ids=["scale", "swapped heads", "no mask", "log2"],
)
def test_a_wrong_formula_is_caught(wrong: dict[str, Any]) -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor, /, **_: Any) -> tuple[Tensor, Tensor]:
        heads = list(wrong.get("heads", (0, 1)))
        mask = replace(CASE, causal=wrong.get("causal", True)).mask
        scale = wrong["softmax_scale"]
        out, lse = materialized_attention(
            q, k[:, :, heads], v[:, :, heads], mask, softmax_scale=scale
        )
        return out.to(q.dtype), (lse / math.log(wrong.get("base", math.e))).float()

    with pytest.raises(AssertionError, match="is not close"):
        check_forward(replace(CASE, heads_k=2), attention)


def test_expected_holds_the_reference_and_the_low_precision_formula() -> None:
    inputs = make_inputs(CASE)
    want = expected(CASE, inputs)
    scale = CASE.softmax_scale
    reference = materialized_attention(*inputs, CASE.mask, softmax_scale=scale)
    low = low_precision_attention(*inputs, CASE.mask, softmax_scale=scale)
    assert all(map(torch.equal, want, (*reference, *low)))
