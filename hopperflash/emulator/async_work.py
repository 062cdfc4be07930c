"""When asynchronous work completes: at issue, as late as the rules allow, or at random."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

SCHEDULES = ("eager", "lazy", "random")


class _Load(NamedTuple):
    land: Callable[[], None]
    signals: Sequence[Any]


class AsyncWork:
    """Queued loads and the clock of the schedule."""

    def __init__(self, schedule: str, seed: int) -> None:
        if schedule not in SCHEDULES:
            raise ValueError(f"schedule {schedule!r} is not one of {', '.join(SCHEDULES)}")
        self.schedule = schedule
        self.random = random.Random(seed)
        self._queue: list[_Load] = []

    def at_issue(self) -> bool:
        """Should work that may complete now do so?"""
        return self.schedule == "eager" or (
            self.schedule == "random" and self.random.random() < 0.3
        )

    def submit(self, land: Callable[[], None], signals: Sequence[Any] = ()) -> None:
        """A load: when it lands its bytes arrive and the mbarriers in `signals` are told."""
        if self.at_issue():
            land()
        else:
            self._queue.append(_Load(land, signals))

    def tick(self) -> None:
        """Between two steps of the scheduler."""
        if self._queue and self.schedule == "random" and self.random.random() < 0.2:
            self.complete_one(())

    def complete_one(self, awaited: Collection[int]) -> bool:
        """Complete one queued load; False when there is none.

        The lazy schedule takes the oldest that signals an awaited mbarrier (by id), so that data
        nobody waits for stays away.
        """
        if not self._queue:
            return False
        if self.schedule == "lazy":
            wanted = (
                i
                for i, load in enumerate(self._queue)
                if any(id(barrier) in awaited for barrier in load.signals)
            )
            index = next(wanted, 0)
        else:
            index = self.random.randrange(len(self._queue))
        self._queue.pop(index).land()
        return True
