"""Racy kernels and their clean twins: the one is reported in every schedule, the other in none."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from tests.support.ptx import execute

RUNS = (("eager", 0), ("lazy", 0), ("random", 1), ("random", 2))


def hazards_of(body: str, schedule: str, seed: int, **options: Any) -> list[str]:
    """The hazards of a kernel with an output, %d0, and 4 KB of input, %d1."""
    out, source = np.zeros(1024, np.uint32), np.arange(1024, dtype=np.uint32)
    return execute(body, out, source, schedule=schedule, seed=seed, **options).hazards


def check_twins(racy: str, clean: str, report: str, **options: Any) -> None:
    """`racy` is reported as `report` (a pattern), and as nothing else; `clean` as nothing."""
    for schedule, seed in RUNS:
        assert hazards_of(clean, schedule, seed, **options) == []
        found = hazards_of(racy, schedule, seed, **options)
        assert found, f"{schedule}: nothing is reported"
        assert all(re.search(report, hazard) for hazard in found), f"{schedule}: {found}"
        assert all("CTA (0, 0, 0)" in hazard or "CTA (1, 0, 0)" in hazard for hazard in found)
        assert all("kernel kernel" in hazard for hazard in found)
