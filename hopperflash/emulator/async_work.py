"""When asynchronous work completes: at issue, as late as the rules allow, or at random."""

from __future__ import annotations

import random
from collections.abc import Callable

SCHEDULES = ("eager", "lazy", "random")


class AsyncWork:
    """Queued loads and the clock of the schedule."""

    def __init__(self, schedule: str, seed: int) -> None:
        if schedule not in SCHEDULES:
            raise ValueError(f"schedule {schedule!r} is not one of {', '.join(SCHEDULES)}")
        self.schedule = schedule
        self.random = random.Random(seed)
        self._queue: list[Callable[[], None]] = []

    def at_issue(self) -> bool:
        """Should work that may complete now do so?"""
        return self.schedule == "eager" or (
            self.schedule == "random" and self.random.random() < 0.3
        )

    def submit(self, land: Callable[[], None]) -> None:
        """A load: its bytes arrive and its mbarrier is signalled when it lands."""
        if self.at_issue():
            land()
        else:
            self._queue.append(land)

    def tick(self) -> None:
        """Between two steps of the scheduler."""
        if self._queue and self.schedule == "random" and self.random.random() < 0.2:
            self.complete_one()

    def complete_one(self) -> bool:
        """Complete one queued load; False when there is none."""
        if not self._queue:
            return False
        index = 0 if self.schedule == "lazy" else self.random.randrange(len(self._queue))
        self._queue.pop(index)()
        return True
