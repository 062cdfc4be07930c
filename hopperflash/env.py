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


ENV_VARS = (
    EnvVar(
        "HOPPERFLASH_ARCH",
        "",
        "target to plan and compile for, such as sm_90a; empty: that of the tensors' device",
    ),
)


def read(name: str) -> str:
    """The value of a variable of `ENV_VARS` now; KeyError for any other name."""
    for variable in ENV_VARS:
        if variable.name == name:
            return os.environ.get(name) or variable.default
    raise KeyError(f"{name} is not in ENV_VARS")
