"""The Ampere kernels, executed through their real host code, on the cases of the Hopper ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

import hopperflash
from hopperflash.plan.tiles import padded_head_dim
from hopperflash.runtime.emulation import SCHEDULES
from tests.support.cases import FORWARD_CASES, Case, check_forward
from tests.support.gradient_cases import BACKWARD_CASES, BackwardCase, check_backward

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
    if max(case.head_dim, case.head_dim_v) <= 64:
        return True
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
