"""The Ampere kernels, executed through their real host code, on the cases of the Hopper ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import hopperflash
from hopperflash.plan.tiles import padded_head_dim
from hopperflash.runtime.emulation import SCHEDULES
from tests.support.band_cases import BAND_CASES
from tests.support.cases import FORWARD_CASES, Case, check_forward
from tests.support.gradient_cases import BACKWARD_CASES, BackwardCase, check_backward
from tests.support.packed_cases import (
    PACKED_CASES,
    PackedCase,
    check_packed,
    compute,
    runs_by_default,
)

pytestmark = pytest.mark.emulated

# Each dtype on the parts of one tile table.
ARCH_OF = {"bf16": "sm_80", "fp16": "sm_86"}


def _params(cases: Sequence[Case]) -> list[Any]:
    """Every case in one schedule; compiling costs most, so half of the kernels are slow tests."""
    return [
        pytest.param(
            case,
            SCHEDULES[index % 3],
            id=f"{case}-{SCHEDULES[index % 3]}",
            marks=[
                pytest.mark.xdist_group(f"sm80-{case.dtype}-{padded_head_dim(case.head_dim)}"),
                *([] if _is_sampled(case) else [pytest.mark.slow]),
            ],
        )
        for index, case in enumerate(cases)
    ]


def _is_sampled(case: Case) -> bool:
    """Causal bf16 and full fp16, so that each table has each head dim with one mask; of groups, at
    head dim 64, the smallest and one that leaves rows idle; of unequal head dims a V wider than K
    and, up to 64, a narrower."""
    small = max(case.head_dim, case.head_dim_v) <= 64
    if case.name == "group" and not (small and case.heads_q // case.heads_k in (1, 2, 3)):
        return False
    if case.name == "unequal" and not small:
        return case.head_dim_v > case.head_dim
    return case.causal == (case.dtype == "bf16")


@pytest.mark.parametrize(("case", "schedule"), _params(FORWARD_CASES))
def test_forward_matches_fp64(case: Case, schedule: str) -> None:
    with hopperflash.emulate(ARCH_OF[case.dtype], schedule=schedule, seed=1) as run:
        check_forward(case, hopperflash.flash_attn_func)
    assert run.hazards == []
    assert run.counters["shared_bank_conflicts"] == 0
    (launch,) = run.launches
    assert launch.kernel_name.startswith("hopperflash_fwd_sm80_")


@pytest.mark.parametrize(("case", "schedule"), _params(BACKWARD_CASES))
def test_backward_matches_fp64(case: BackwardCase, schedule: str) -> None:
    with hopperflash.emulate(ARCH_OF[case.dtype], schedule=schedule, seed=1) as run:
        check_backward(case, hopperflash.flash_attn_func)
    assert run.hazards == []
    assert run.counters["shared_bank_conflicts"] == 0
    names = [launch.kernel_name for launch in run.launches]
    for name, kernel in zip(
        names, ("fwd_sm80", "bwd_preprocess", "bwd_sm80", "bwd_postprocess"), strict=True
    ):
        assert name.startswith(f"hopperflash_{kernel}_")


def _variant_params(cases: Sequence[BackwardCase], layout: str) -> list[Any]:
    """Every case in one schedule; of the head dims one that keeps P in registers and one that does
    not, the others are slow tests, and so are those of the other dtype."""
    return [
        pytest.param(
            case,
            SCHEDULES[1 + index % 2],
            id=f"{case}-{SCHEDULES[1 + index % 2]}",
            marks=[
                pytest.mark.xdist_group(f"sm80-{layout}-{case.mask.kind.value}-{case.head_dim}"),
                *([] if _variant_is_sampled(case) else [pytest.mark.slow]),
            ],
        )
        for index, case in enumerate(cases)
    ]


def _variant_is_sampled(case: BackwardCase) -> bool:
    return case.dtype == "bf16" and runs_by_default(case, wide=(192, 192))


@pytest.mark.parametrize(("case", "schedule"), _variant_params(BAND_CASES, "dense"))
def test_windows_and_caps_match_fp64(case: BackwardCase, schedule: str) -> None:
    with hopperflash.emulate(ARCH_OF[case.dtype], schedule=schedule, seed=1) as run:
        check_forward(case, hopperflash.flash_attn_func)
        check_backward(case, hopperflash.flash_attn_func)
    assert run.hazards == []
    assert run.counters["shared_bank_conflicts"] == 0


@pytest.mark.parametrize(("case", "schedule"), _variant_params(PACKED_CASES, "packed"))
def test_packed_sequences_match_fp64(case: PackedCase, schedule: str) -> None:
    with hopperflash.emulate(ARCH_OF[case.dtype], schedule=schedule, seed=1) as run:
        found = compute(case)
    check_packed(case, found)
    assert run.hazards == []
    assert run.counters["shared_bank_conflicts"] == 0


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            id=str(case),
            marks=pytest.mark.xdist_group(f"sm80-packed-{case.mask.kind.value}-{case.head_dim}"),
        )
        for case in PACKED_CASES
        if case.deterministic and case.head_dim == 64
    ],
)
def test_packed_gradients_repeat_bit_for_bit(case: PackedCase) -> None:
    runs = []
    for seed in (1, 2):
        with hopperflash.emulate("sm_80", schedule="random", seed=seed, hazards="basic"):
            runs.append(compute(case))
    for name, first, second in zip(runs[0]._fields, *runs, strict=True):
        assert torch.equal(first, second), name
