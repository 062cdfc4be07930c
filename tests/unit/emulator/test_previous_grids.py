"""Programmatic dependent launch: memory that an earlier launch may still use is waited for."""

from __future__ import annotations

import numpy as np
import pytest

from hopperflash.emulator.previous_grids import PreviousGrids
from hopperflash.emulator.traffic import TouchedBytes
from tests.support.ptx import execute

WRITE = "add.s64 %d20, %d0, %d30; st.global.b32 [%d20], 7;"
READ = "add.s64 %d20, %d0, %d30; ld.global.b32 %r9, [%d20];"
WAIT = "griddepcontrol.wait;"
TRIGGER = "griddepcontrol.launch_dependents;"


def _last_hazards(*launches: tuple[str, bool, int]) -> list[str]:
    """Of the last of (body, programmatic, array) launches on two arrays."""
    arrays = [np.zeros(64, np.uint32), np.zeros(64, np.uint32)]
    previous, hazards = PreviousGrids(), []
    for body, programmatic, array in launches:
        previous.start(programmatic)
        hazards = execute(body, arrays[array], previous=previous).hazards
    return hazards


@pytest.mark.parametrize(
    ("first", "second"), [(WRITE, READ), (WRITE, WRITE), (READ, WRITE)], ids=["raw", "waw", "war"]
)
def test_access_before_the_wait(first, second):
    (message,) = _last_hazards((first, False, 0), (second, True, 0))
    assert "before griddepcontrol.wait" in message
    assert _last_hazards((first, False, 0), (WAIT + second, True, 0)) == []
    assert _last_hazards((first, False, 0), (second + WAIT, True, 0)) != []


def test_what_does_not_conflict_needs_no_wait():
    assert _last_hazards((WRITE, False, 0), (READ, True, 1)) == []
    assert _last_hazards((READ, False, 0), (READ, True, 0)) == []
    assert _last_hazards((WRITE, False, 0), (READ, False, 0)) == []


def test_a_launch_that_started_early_lets_the_next_overlap_with_both():
    chain = [(WRITE, False, 0), (TRIGGER + WAIT, True, 1)]
    assert _last_hazards(*chain, (READ, True, 0)) != []
    assert _last_hazards(*chain, (WAIT + READ, True, 0)) == []
    assert _last_hazards(*chain, (READ, False, 0)) == []


def test_large_regions_are_recorded_by_address():
    touched, end = TouchedBytes(), 1 << 33
    touched.items(0, end, np.array([0, 1, 1 << 30]), 4)
    touched.box(0, end, 16, (2, 4), (1 << 32, 2), 2)
    assert touched.count() == 3 * 4 + 2 * 4 * 2
    assert touched.meets(np.array([1 << 32]), 4)
    assert not touched.meets(np.array([64]), 4)
