"""The only reader of environment variables."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class EnvVar:
    """A variable the package reads; `default` holds where it is unset or empty."""

    name: str
    default: str
    meaning: str


# Empty so far: a variable is listed from the day something reads it.
ENV_VARS: tuple[EnvVar, ...] = ()


def read(name: str) -> str:
    """The value of a variable of `ENV_VARS` now; KeyError for any other name."""
    for variable in ENV_VARS:
        if variable.name == name:
            return os.environ.get(name) or variable.default
    raise KeyError(f"{name} is not in ENV_VARS")
