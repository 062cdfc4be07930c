"""Which kernels this checkout can run."""

from __future__ import annotations

import importlib
from functools import cache

from hopperflash.plan import arch_of
from hopperflash.plan.sm80 import SM80
from hopperflash.plan.sm90 import SM90


@cache
def runs(arch: str, direction: str) -> bool:
    """Whether the kernels of a target import; the cpu needs none."""
    if arch == "cpu":
        return True
    family = SM90 if "wgmma" in arch_of(arch).features else SM80
    try:
        importlib.import_module(getattr(family, direction).module)
    except ImportError:
        return False
    return True
