"""Windows, caps and packed sequences on the Hopper kernels and the cpu backend, against fp64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

import hopperflash
from hopperflash.runtime.emulation import SCHEDULES
from tests.support.band_cases import BAND_CASES
from tests.support.cases import check_forward
from tests.support.gradient_cases import BackwardCase, check_backward
from tests.support.packed_cases import (
    PACKED_CASES,
    PackedCase,
    check_packed,
    compute,
    runs_by_default,
)

pytestmark = pytest.mark.emulated


def _params(cases: Sequence[BackwardCase]) -> list[Any]:
    """Every case in one schedule; compiling costs most, so half of the kernels are slow tests."""
    return [
        pytest.param(
            case,
            SCHEDULES[index % 3],
            id=f"{case}-{SCHEDULES[index % 3]}",
            marks=[
                pytest.mark.xdist_group(f"bands-{case.mask.kind.value}-{case.head_dim}"),
                *([] if runs_by_default(case, wide=(192, 128)) else [pytest.mark.slow]),
            ],
        )
        for index, case in enumerate(cases)
    ]


@pytest.mark.parametrize(("case", "schedule"), _params(BAND_CASES))
def test_windows_and_caps_match_fp64(case: BackwardCase, schedule: str) -> None:
    with hopperflash.emulate("sm_90a", schedule=schedule, seed=1) as run:
        check_forward(case, hopperflash.flash_attn_func)
        check_backward(case, hopperflash.flash_attn_func)
    assert run.hazards == []


@pytest.mark.parametrize(("case", "schedule"), _params(PACKED_CASES))
def test_packed_sequences_match_fp64(case: PackedCase, schedule: str) -> None:
    with hopperflash.emulate("sm_90a", schedule=schedule, seed=1) as run:
        found = compute(case)
    check_packed(case, found)
    assert run.hazards == []


@pytest.mark.parametrize("case", BAND_CASES, ids=str)
def test_windows_and_caps_on_the_cpu_backend(case: BackwardCase) -> None:
    check_forward(case, hopperflash.flash_attn_func)
    check_backward(case, hopperflash.flash_attn_func)


@pytest.mark.parametrize("case", PACKED_CASES, ids=str)
def test_packed_sequences_on_the_cpu_backend(case: PackedCase) -> None:
    check_packed(case, compute(case))
