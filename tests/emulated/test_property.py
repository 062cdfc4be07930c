"""Whole problems at random, on every backend, against fp64.

Compiling costs most, so a test draws several problems of one variant of the kernels. Its name holds
the seed, which draws the same problems again.
"""

from __future__ import annotations

from typing import Any

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.support.drawn import STRATIFIED, Drawn, check, problems, variant_of

pytestmark = pytest.mark.emulated

# Problems by variant and architecture: 10 by default and 300 more in the long run, of each of the
# emulated ones; no two are alike.
DEFAULT_DRAWS, LONG_DRAWS = 2, 10
LONG = 30  # variants beside the stratified ones


def _seeds() -> list[Any]:
    default = len(STRATIFIED)
    return [
        pytest.param(seed, marks=[pytest.mark.slow] if seed >= default else [])
        for seed in range(default + LONG)
    ]


@pytest.mark.parametrize("seed", _seeds())
@pytest.mark.parametrize("arch", ["cpu", "sm_90a", "sm_80"])
def test_problems_match_fp64(arch: str, seed: int, request: pytest.FixtureRequest) -> None:
    draws = DEFAULT_DRAWS if seed < len(STRATIFIED) else LONG_DRAWS
    checked = set()

    @hypothesis.seed(f"{arch}-{seed}")
    @settings(
        max_examples=draws,
        deadline=None,
        database=None,
        phases=(Phase.generate,),  # shrinking would take an hour
        suppress_health_check=[*HealthCheck],
        print_blob=False,
    )
    @given(problems(variant_of(seed)))
    def check_drawn(drawn: Drawn) -> None:
        checked.add(drawn)
        check(drawn, arch)

    # A slow test is deselected without -m.
    print(f"to draw this again: pytest -n 0 -m '' '{request.node.nodeid}'")
    check_drawn()
    assert len(checked) == draws
