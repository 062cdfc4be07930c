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
        self._started: list[Callable[[], None]] = []

    def at_issue(self) -> bool:
        """Should work that may complete now do so?"""
        return self.schedule == "eager" or (
            self.schedule == "random" and self.random.random() < 0.3
        )

    def company(self) -> int:
        """How many clusters are resident from the start; more come when none can go on."""
        return self.random.randint(1, 4) if self.schedule == "random" else 1

    def turn(self) -> int:
        """Steps that a cluster runs before the next one's turn."""
        return self.random.choice((4, 32, 256)) if self.schedule == "random" else 64

    def start(self, complete: Callable[[], None]) -> None:
        """Work that a wait completes at the latest; `complete` may be called again then."""
        if self.schedule == "eager":
            complete()
        elif self.schedule == "random":
            drawn = self.random.random()
            if drawn < 0.3:
                complete()
            elif drawn < 0.7:
                self._started.append(complete)

    def submit(self, land: Callable[[], None], signals: Sequence[Any] = ()) -> None:
        """A load: when it lands its bytes arrive and the mbarriers in `signals` are told."""
        if self.at_issue():
            land()
        else:
            self._queue.append(_Load(land, signals))

    def tick(self) -> None:
        """Between two steps of the scheduler."""
        if self.schedule != "random":
            return
        if self._queue and self.random.random() < 0.2:
            self.complete_one(())
        if self._started and self.random.random() < 0.1:
            self._started.pop(self.random.randrange(len(self._started)))()

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
