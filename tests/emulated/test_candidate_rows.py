"""Rows that the search can choose and no table has compute what they should."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import hopperflash
from hopperflash.plan import planner, tiles_sm90
from hopperflash.plan.config import POperand
from hopperflash.plan.tiles import ANY
from hopperflash.plan.tiles_sm90 import BackwardTile, ForwardTile
from hopperflash.runtime.emulation import SCHEDULES
from tests.support.cases import Case, check_forward
from tests.support.gradient_cases import BackwardCase, check_backward

pytestmark = [pytest.mark.emulated, pytest.mark.xdist_group("bf16-96")]

SHARED_P = ForwardTile(96, 96, ANY, 192, 128, POperand.SHARED, "FA4 causal")
CASE = Case("shared-p", seqlen_q=200, seqlen_k=333, head_dim=96, head_dim_v=96)
D64, D128 = {"head_dim": 64, "head_dim_v": 64}, {"head_dim": 128, "head_dim_v": 128}
QUERY_ROWS = (
    # Two blocks of rows to a warpgroup; each has the queries of one of them of dQ.
    (
        BackwardTile(64, 64, ANY, 128, 96, 2, 2, 2, "two blocks", query_rows=True),
        BackwardCase("rows", seqlen_q=200, seqlen_k=150, heads_q=2, causal=True, **D64),
    ),
    # dQ's transpose beside those of dK and dV.
    (
        BackwardTile(128, 128, ANY, 64, 96, 2, 2, 2, "all", dq_swap_ab=True, query_rows=True),
        BackwardCase("transposes", "fp16", seqlen_q=130, seqlen_k=170, window=(60, 20), **D128),
    ),
)


@contextmanager
def _only(table: str, row: Any) -> Iterator[None]:
    """Plans with one row in a table."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles_sm90, table, (row,))
        planner._plan.cache_clear()
        try:
            yield
        finally:
            planner._plan.cache_clear()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_p_in_shared_memory(schedule: str) -> None:
    with (
        _only("FORWARD_TILES", SHARED_P),
        hopperflash.emulate("sm_90a", schedule=schedule, seed=1) as run,
    ):
        check_forward(CASE, hopperflash.flash_attn_func)
    assert run.hazards == []
    (launch,) = run.launches
    assert "_192x128_" in launch.kernel_name


@pytest.mark.parametrize(("row", "case"), QUERY_ROWS, ids=lambda part: getattr(part, "source", ""))
def test_queries_as_rows(row: BackwardTile, case: BackwardCase) -> None:
    with (
        _only("BACKWARD_TILES", row),
        hopperflash.emulate("sm_90a", schedule="random", seed=1) as run,
    ):
        check_backward(case, hopperflash.flash_attn_func)
    assert run.hazards == []
    names = [launch.kernel_name for launch in run.launches]
    assert any(f"_{row.tile_m}x{row.tile_n}_" in name for name in names)
