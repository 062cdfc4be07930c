"""The answer to "can you compute this?"."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Support:
    """`ok`, or every reason why not; true exactly when `ok`."""

    ok: bool
    reasons: tuple[str, ...] = ()

    @classmethod
    def unless(cls, reasons: Iterable[str]) -> Support:
        """Support that holds unless there is a reason against it."""
        found = tuple(reasons)
        return cls(not found, found)

    def __bool__(self) -> bool:
        return self.ok
