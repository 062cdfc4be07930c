"""Kernels with one instruction broken: what a test suite worth its name must notice."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

import hopperflash.runtime.launch as launch_module

_NEVER_WAITS = "setp.eq.u32 P1, 0, 0;"  # what the inline wait loop's predicate becomes


@dataclass(frozen=True)
class Fault:
    """A kind of fault: the PTX lines that it can strike and what becomes of one."""

    name: str
    pattern: str
    replacement: str = ""

    def sites(self, ptx: str) -> list[int]:
        """Line indices where the fault can be seeded."""
        return [i for i, line in enumerate(ptx.splitlines()) if re.search(self.pattern, line)]

    def seed(self, ptx: str, site: int) -> str:
        """The PTX with the instruction on line `site` removed or replaced."""
        lines = ptx.splitlines()
        assert re.search(self.pattern, lines[site])
        lines[site] = self.replacement
        return "\n".join(lines)

    def seed_everywhere(self, ptx: str) -> str:
        """The PTX with the instruction broken wherever it stands."""
        for site in self.sites(ptx):
            ptx = self.seed(ptx, site)
        return ptx


WGMMA_WAIT = Fault("wgmma-wait", r"^\s*wgmma\.wait_group")
MBARRIER_WAIT = Fault("mbarrier-wait", r"^\s*mbarrier\.try_wait", _NEVER_WAITS)
MBARRIER_ARRIVE = Fault("mbarrier-arrive", r"^\s*(@\S+\s+)?mbarrier\.arrive")
PROXY_FENCE = Fault("proxy-fence", r"^\s*fence\.proxy\.async")
EPILOGUE_BARRIER = Fault("epilogue-barrier", r"^\s*bar\.sync\s+%r")
NAMED_BARRIER_SYNC = Fault("named-barrier-sync", r"^\s*bar\.sync\s+[1-9]")
NAMED_BARRIER_ARRIVE = Fault("named-barrier-arrive", r"^\s*bar\.arrive\s+[1-9]")
BULK_WAIT = Fault("bulk-wait", r"^\s*cp\.async\.bulk\.wait_group")


class MutantKernel:
    """A compiled kernel that executes other PTX; everything else is the original's."""

    def __init__(self, compiled: Any, ptx: str) -> None:
        self._compiled = compiled
        self._hopperflash_emulation = None  # the original's parsed module must not be found
        self.__ptx__ = ptx

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiled, name)


@contextmanager
def mutated(mutate: Callable[[str], str]) -> Iterator[None]:
    """Inside, every launch executes `mutate(PTX)`."""
    original = launch_module.compile_kernel

    def compile_mutant(spec: Any) -> MutantKernel:
        compiled = original(spec)
        return MutantKernel(compiled, mutate(compiled.artifacts.PTX))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch_module, "compile_kernel", compile_mutant)
        yield
