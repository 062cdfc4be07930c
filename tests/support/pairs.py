"""Pairs of CTAs for problems that are too short for the plan to give them some."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from hopperflash.plan import clusters, planner


@contextmanager
def pairs_wherever_they_can_be(idle_limit: int = 1) -> Iterator[None]:
    """Whatever share of their steps is idle."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clusters, "_IDLE_LIMIT", idle_limit)
        planner._plan.cache_clear()
        try:
            yield
        finally:
            planner._plan.cache_clear()
