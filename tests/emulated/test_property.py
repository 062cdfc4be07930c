"""Whole problems at random, on every backend, against fp64.

Compiling costs most, so a test draws several problems of one variant of the kernels. Its name holds
the seed, which draws the same problems again.
"""

from __future__ import annotations

from typing import Any

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.support.drawn import Drawn, check, problems, variant_of

pytestmark = pytest.mark.emulated

DRAWS = 5  # problems a test
DEFAULT, LONG = 4, 30  # tests an architecture: 40 and 300 problems on the two emulated ones


def _seeds() -> list[Any]:
    return [
        pytest.param(seed, marks=[pytest.mark.slow] if seed >= DEFAULT else [])
        for seed in range(LONG)
    ]


@pytest.mark.parametrize("seed", _seeds())
@pytest.mark.parametrize("arch", ["cpu", "sm_90a", "sm_80"])
def test_problems_match_fp64(arch: str, seed: int, request: pytest.FixtureRequest) -> None:
    @hypothesis.seed(seed)
    @settings(
        max_examples=DRAWS,
        deadline=None,
        database=None,
        phases=(Phase.generate,),  # shrinking would take an hour
        suppress_health_check=[*HealthCheck],
        print_blob=False,
    )
    @given(problems(variant_of(seed)))
    def check_drawn(drawn: Drawn) -> None:
        check(drawn, arch)

    print(f"to draw this again: pytest -n 0 '{request.node.nodeid}'")
    check_drawn()
