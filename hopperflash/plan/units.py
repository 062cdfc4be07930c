"""What the units of an SM do in a clock, and how long a step of a loop keeps each of them busy.

Rates of sm_90a: 4096 FLOP of dense 16-bit tensor work (a wgmma m64nNk16 takes N / 2 clocks), four
sub-cores of one warp instruction each, 32 lanes of fp32 arithmetic, 16 of integer, compare, pack
and 4 of special functions per sub-core, 128 bytes of shared memory, about 32 bytes from L2. An A100
has half the tensor work (mma.sync m16n8k16: 8 clocks of a sub-core), half the fp32 lanes, and about
47 bytes from L2.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import NamedTuple

SUB_CORES = 4
SHARED_BYTES = 128
# Clocks that a warp instruction occupies its pipe of one sub-core.
MUFU_CLOCKS = 8
ALU_CLOCKS = 2
HMMA_CLOCKS = 8


class Rates(NamedTuple):
    """What differs between architectures."""

    fma_clocks: int  # as above
    imad_clocks: int
    l2_bytes: int  # a clock and SM


HOPPER = Rates(fma_clocks=1, imad_clocks=2, l2_bytes=32)
AMPERE = Rates(fma_clocks=2, imad_clocks=2, l2_bytes=47)


class Bound(NamedTuple):
    """The unit that is busy longest, and for how many clocks."""

    unit: str
    clocks: float


@dataclass(frozen=True)
class UnitClocks:
    """Clocks that a step keeps each unit of an SM busy.

    All units work at the same time, so the longest bounds the step from below: `bound`.
    """

    tensor: float
    mufu: float
    issue: float
    fma: float
    alu: float
    shared: float
    l2: float

    @property
    def bound(self) -> Bound:
        """The first of the units with most clocks."""
        clocks = {LABELS[field.name]: getattr(self, field.name) for field in fields(self)}
        unit = max(clocks, key=lambda name: clocks[name])
        return Bound(unit, clocks[unit])

    @property
    def l2_demand(self) -> float:
        """L2's clocks over those of the longest other unit: 1 where L2 is at its edge."""
        return self.l2 / replace(self, l2=0).bound.clocks

    def __str__(self) -> str:
        return ", ".join(f"{label} {getattr(self, name):.0f}" for name, label in LABELS.items())


LABELS = {
    "tensor": "tensor cores",
    "mufu": "MUFU",
    "issue": "issue",
    "fma": "FMA",
    "alu": "ALU",
    "shared": "shared memory",
    "l2": "L2",
}
