"""A pytest fixture that runs compiled kernels in the emulator and fails on hazards.

Turn it on in a `conftest.py`: `pytest_plugins = ["hopperflash.emulator.pytest_plugin"]`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from .async_work import SCHEDULES
from .run import EmulationRun, launch


class Emulator:
    """Launches kernels with one schedule; `run` holds launches, counters and hazards of all."""

    def __init__(self, schedule: str) -> None:
        self.schedule = schedule
        self.run = EmulationRun()

    def launch(self, compiled: Any, *args: Any, **options: Any) -> EmulationRun:
        """As `hopperflash.emulator.launch`; adds to the test's run."""
        return launch(
            compiled, *args, **{"schedule": self.schedule, "run": self.run, **options}
        )  # fmt: skip


@pytest.fixture(params=SCHEDULES)
def emulator(request: pytest.FixtureRequest) -> Iterator[Emulator]:
    """Runs the test once with each schedule; any hazard that is left in `run` fails it."""
    made = Emulator(request.param)
    yield made
    if made.run.hazards:
        pytest.fail("hazards:\n" + "\n".join(made.run.hazards), pytrace=False)
