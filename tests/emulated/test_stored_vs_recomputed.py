"""The bytes that the page of the stored backward calls counted."""

from __future__ import annotations

import pytest

from profiling import recomputation_bytes

pytestmark = [pytest.mark.emulated, pytest.mark.xdist_group("bf16-64")]


def test_the_emulator_counts_what_the_model_says() -> None:
    found = recomputation_bytes.emulated(128)
    assert found.asked > 0 and found.once > 0
    assert found.as_modelled
