"""Refusals: one headline, then every reason on a line of its own."""

from __future__ import annotations

from collections.abc import Iterable


class HopperflashError(Exception):
    """Base of every error this package raises on purpose.

    `reasons` holds what a program may want to read; the message is for people.
    """

    def __init__(self, headline: str, reasons: Iterable[str] = ()) -> None:
        self.headline = headline
        self.reasons = tuple(reasons)
        super().__init__("\n".join([headline, *(f"- {reason}" for reason in self.reasons)]))

    def __reduce__(self) -> tuple[type[HopperflashError], tuple[str, tuple[str, ...]]]:
        return type(self), (self.headline, self.reasons)


class InvalidArgument(HopperflashError, ValueError):
    """The arguments do not describe an attention problem."""


class UnsupportedProblem(HopperflashError, NotImplementedError):
    """A well-formed problem that no backend can compute; one or more reasons per backend."""


class CompileError(HopperflashError, RuntimeError):
    """A planned kernel did not compile."""
