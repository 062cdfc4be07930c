"""The Hopper backward kernels, executed through autograd and their real host code, against fp64."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

import hopperflash
from hopperflash.plan.tiles import padded_head_dim
from hopperflash.runtime.emulation import SCHEDULES
from tests.support.gradient_cases import BACKWARD_CASES, KERNELS, BackwardCase, check_backward

pytestmark = pytest.mark.emulated

KERNEL_NAMES = ("fwd_sm90", "bwd_preprocess", "bwd_sm90", "bwd_postprocess")


def _params() -> list[Any]:
    """Every case in the lazy schedule, which shows missing waits, and in one of the others."""
    return [
        pytest.param(
            case,
            schedule,
            id=f"{case}-{schedule}",
            marks=[
                pytest.mark.xdist_group(f"{case.dtype}-{padded_head_dim(case.head_dim)}"),
                *([pytest.mark.slow] if _has_a_twin(case) else []),
            ],
        )
        for (index, case), schedule in product(enumerate(BACKWARD_CASES), SCHEDULES)
        if schedule in ("lazy", ("eager", "random")[index % 2])
    ]


def _has_a_twin(case: BackwardCase) -> bool:
    """Whether kernels of the other dtype, and else the same, run by default: those of causal bf16,
    and of fp16 without a mask. Compiling costs most."""
    head_dims = case.head_dim, case.head_dim_v
    twin = any(
        dtype != case.dtype and causal == case.causal and head_dims in both
        for dtype, causal, both in KERNELS
    )
    return case.name == "head_dim" and twin and case.causal != (case.dtype == "bf16")


@pytest.mark.parametrize(("case", "schedule"), _params())
def test_backward_matches_fp64(case: BackwardCase, schedule: str) -> None:
    with hopperflash.emulate("sm_90a", schedule=schedule, seed=1) as run:
        check_backward(case, hopperflash.flash_attn_func)
    assert run.hazards == []
    for launch, name in zip(run.launches, KERNEL_NAMES, strict=True):
        assert launch.kernel_name.startswith(f"hopperflash_{name}_")
    assert run.launches[2].registers_set == (24, 240)
