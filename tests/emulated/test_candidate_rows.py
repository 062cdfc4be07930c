"""Rows that the search can choose and no table has compute what they should: P in shared memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import hopperflash
from hopperflash.plan import planner, tiles_sm90
from hopperflash.plan.config import POperand
from hopperflash.plan.tiles import ANY
from hopperflash.plan.tiles_sm90 import ForwardTile
from hopperflash.runtime.emulation import SCHEDULES
from tests.support.cases import Case, check_forward

pytestmark = [pytest.mark.emulated, pytest.mark.xdist_group("bf16-96")]

SHARED_P = ForwardTile(96, 96, ANY, 192, 128, POperand.SHARED, "FA4 causal")
CASE = Case("shared-p", seqlen_q=200, seqlen_k=333, head_dim=96, head_dim_v=96)


@pytest.fixture
def _planned_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tiles_sm90, "FORWARD_TILES", (SHARED_P,))
    planner._plan.cache_clear()
    yield
    planner._plan.cache_clear()


@pytest.mark.usefixtures("_planned_anew")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_p_in_shared_memory(schedule: str) -> None:
    with hopperflash.emulate("sm_90a", schedule=schedule, seed=1) as run:
        check_forward(CASE, hopperflash.flash_attn_func)
    assert run.hazards == []
    (launch,) = run.launches
    assert "_192x128_" in launch.kernel_name
