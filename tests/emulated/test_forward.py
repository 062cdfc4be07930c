"""The Hopper forward kernel, executed through its real host code, against fp64."""

from __future__ import annotations

from typing import Any

import pytest

import hopperflash
from hopperflash.plan.tiles import padded_head_dim
from hopperflash.runtime.emulation import SCHEDULES
from tests.support.cases import FORWARD_CASES, Case, check_forward

pytestmark = pytest.mark.emulated


def _params() -> list[Any]:
    """Cases that share a compiled kernel go to one worker, which compiles it once."""
    return [
        pytest.param(
            case,
            id=str(case),
            marks=pytest.mark.xdist_group(f"{case.dtype}-{padded_head_dim(case.head_dim)}"),
        )
        for case in FORWARD_CASES
    ]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("case", _params())
def test_forward_matches_fp64(case: Case, schedule: str) -> None:
    with hopperflash.emulate("sm_90a", schedule=schedule, seed=1) as run:
        check_forward(case, hopperflash.flash_attn_func)
    assert run.hazards == []
    (launch,) = run.launches
    assert launch.registers_set in {(24, 240), (32, 160)}
