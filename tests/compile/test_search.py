"""The search drops what the compiler makes badly."""

from __future__ import annotations

from typing import Any

import pytest

from hopperflash.plan import arch_of
from hopperflash.plan.config import POperand
from hopperflash.plan.tiles import FULL
from hopperflash.plan.tiles_sm80 import ForwardTileSm80
from hopperflash.plan.tiles_sm90 import ForwardTile
from hopperflash.problem import MaskKind
from profiling.candidates import candidate_of, table_of
from profiling.compare_sass import Case
from profiling.search import Question, compile_report, faults_of

pytestmark = pytest.mark.compile

SERIALISED = ForwardTile(96, 96, FULL, 192, 144, POperand.REGISTERS, "")
CLEAN = ForwardTile(96, 96, FULL, 192, 144, POperand.SHARED, "")
SPILLING = ForwardTileSm80(128, 128, 128, 64, 4, True, "")


@pytest.mark.parametrize(
    ("arch", "tile", "fault"),
    [
        ("sm_90a", SERIALISED, "wgmma serialised"),
        ("sm_90a", CLEAN, ""),
        ("sm_80", SPILLING, "B spilled"),
    ],
)
def test_faults_are_found_in_machine_code(arch: str, tile: Any, fault: str) -> None:
    asked = Question(Case("forward", tile.head_dim, tile.head_dim_v, MaskKind.FULL), arch_of(arch))
    candidate = candidate_of(tile, asked.case, table_of("forward", asked.arch))
    found = faults_of(compile_report(asked.spec(candidate)))
    assert bool(found) == bool(fault)
    assert not fault or any(fault in each for each in found), found
