"""Packed sequences on every backend, forward and backward, against fp64."""

from __future__ import annotations

import pytest

from tests.support.drawn import check
from tests.support.kernels import runs
from tests.support.packed_cases import PACKED_CASES

pytestmark = pytest.mark.emulated


@pytest.mark.parametrize("name", PACKED_CASES)
@pytest.mark.parametrize("arch", ["cpu", "sm_90a", "sm_80"])
def test_packed_sequences_match_fp64(arch: str, name: str) -> None:
    if not runs(arch, "forward"):
        pytest.skip(f"the kernels of {arch} do not import")
    check(PACKED_CASES[name], arch)
