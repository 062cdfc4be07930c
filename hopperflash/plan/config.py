"""Everything about a kernel that is fixed before it is traced."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

WARPGROUP_THREADS = 128


class POperand(Enum):
    """Where the second GEMM, O += P V, reads its probabilities from."""

    REGISTERS = "registers"
    SHARED = "shared"


@dataclass(frozen=True)
class ForwardConfig:
    """A warp-specialised forward kernel: one producer warpgroup loads, the others compute.

    `tile_m` query rows per CTA, `tile_n` keys per step; head dims are padded to what the tile
    holds; `stages_kv` buffers for K and as many for V; registers are per thread of each role.
    """

    tile_m: int
    tile_n: int
    head_dim: int
    head_dim_v: int
    consumer_warpgroups: int
    registers_producer: int
    registers_consumer: int
    p_operand: POperand
    stages_kv: int = 2

    @property
    def threads(self) -> int:
        """Threads per CTA."""
        return WARPGROUP_THREADS * (self.consumer_warpgroups + 1)
