"""Tiles for sm_90a: one row per head dims and mask and direction, edited by hand.

Sources name the peers' tables and the compiler's verdicts on them (spills, serialised wgmma), both
read from public sources; `plan.feasibility` proves each row feasible.
"""

from __future__ import annotations

from dataclasses import dataclass

from hopperflash.plan.config import WGMMA_ROWS, BackwardConfig, ForwardConfig, POperand
from hopperflash.plan.tiles import (
    ANY,
    BANDED,
    FULL,
    OPEN,
    WINDOW,
    first_that_holds,
    padded_head_dim,
)
from hopperflash.problem import MaskKind


@dataclass(frozen=True)
class ForwardTile:
    """One row of the forward table, for head dims up to those given; `source` says where from.

    `capped` says whether it is also for capped scores. `searched` is the day on which the search
    (`profiling.search --check`) last found nothing better for any of its masks, as far as the model
    can tell, and "" where it did; `source` then says why the row is what it is.
    """

    head_dim: int
    head_dim_v: int
    masks: tuple[MaskKind, ...]
    tile_m: int
    tile_n: int
    p_operand: POperand
    source: str
    searched: str = ""
    capped: bool = True


@dataclass(frozen=True)
class BackwardTile:
    """One row of the backward table; `key_warpgroups` of the two consumers stack along the keys,
    `dq_warpgroups` compute dQ, or with `dq_swap_ab` its transpose."""

    head_dim: int
    head_dim_v: int
    masks: tuple[MaskKind, ...]
    tile_m: int
    tile_n: int
    key_warpgroups: int
    dq_warpgroups: int
    stages: int
    source: str
    searched: str = ""
    dq_swap_ab: bool = False
    capped: bool = True


REGS, SMEM = POperand.REGISTERS, POperand.SHARED

# The first row that holds both head dims counts.
FORWARD_TILES = (
    ForwardTile(64, 64, OPEN, 192, 128, REGS, "FA4 at every mask; FA3 causal", "2026-11-30"),
    ForwardTile(64, 64, WINDOW, 192, 128, REGS, "FA4", capped=False),
    ForwardTile(64, 64, WINDOW, 128, 128, REGS, "192: two edges and a cap spill", "2026-11-30"),
    ForwardTile(96, 96, FULL, 192, 144, SMEM, "FA3 and FA4 full; as below, O rescaled less often"),
    ForwardTile(96, 96, BANDED, 192, 128, SMEM, "FA4 causal; P in registers spills and serialises"),
    ForwardTile(128, 128, ANY, 128, 128, REGS, "FA4; least waste at edges and end", "2026-11-30"),
    ForwardTile(192, 128, ANY, 128, 128, REGS, "FA4; a narrow V leaves room", "2026-11-30"),
    ForwardTile(192, 192, OPEN, 128, 112, REGS, "FA3, FA4; the shared-memory limit", "2026-11-30"),
    ForwardTile(192, 192, WINDOW, 128, 96, REGS, "FA3, FA4; less waste at the edges", "2026-11-30"),
    ForwardTile(256, 256, OPEN, 128, 80, REGS, "FA3, FA4; the shared-memory limit", "2026-11-30"),
    ForwardTile(256, 256, WINDOW, 128, 64, REGS, "FA3, FA4; less waste at the edges", "2026-11-30"),
)

BACKWARD_TILES = (
    BackwardTile(64, 64, ANY, 128, 128, 2, 2, 2, "FA3 and FA4", "2026-11-30", capped=False),
    BackwardTile(64, 64, ANY, 64, 128, 2, 1, 2, "a cap, or packed in order, would spill at 128"),
    BackwardTile(96, 96, ANY, 64, 128, 2, 1, 2, "FA4; 128 need 248 registers", "2026-11-30"),
    BackwardTile(128, 128, ANY, 64, 128, 2, 1, 2, "FA3, FA4 causal; dQ wants 64s", "2026-11-30"),
    BackwardTile(128, 192, ANY, 64, 64, 1, 1, 2, "with 128 keys some would spill"),
    BackwardTile(192, 128, ANY, 48, 128, 2, 2, 2, "64 spills", "2026-11-30", dq_swap_ab=True),
    BackwardTile(192, 192, ANY, 96, 64, 1, 2, 2, "32x128 spills", "2026-11-30", dq_swap_ab=True),
    BackwardTile(256, 256, ANY, 64, 64, 1, 2, 2, "FA4; the shared-memory limit", "2026-11-30"),
)

# Registers per thread of (producer, consumers) by consumer warpgroups: the split FA3 and FA4 use.
REGISTER_SPLIT = {2: (24, 240), 3: (32, 160)}
BACKWARD_CONSUMERS = 2
# Up to which head dim warpgroups take turns: FA3's. Beyond, a softmax is short beside its GEMMs.
PING_PONG_HEAD_DIM = 128


def forward_tile(
    head_dim: int, head_dim_v: int, mask_kind: MaskKind, capped: bool = False
) -> ForwardTile:
    """The row for two head dims, a mask and a cap; LookupError where the table has none."""
    rows = (row for row in FORWARD_TILES if row.capped or not capped)
    return first_that_holds(rows, head_dim, head_dim_v, mask_kind)


def backward_tile(
    head_dim: int, head_dim_v: int, mask_kind: MaskKind, capped: bool = False
) -> BackwardTile:
    """The row for two head dims, a mask and a cap; LookupError where the table has none."""
    rows = (row for row in BACKWARD_TILES if row.capped or not capped)
    return first_that_holds(rows, head_dim, head_dim_v, mask_kind)


def forward_config(tile: ForwardTile, head_dim: int, head_dim_v: int) -> ForwardConfig:
    """The kernel configuration of a row: 64 query rows per consumer warpgroup."""
    consumer_warpgroups = tile.tile_m // WGMMA_ROWS
    registers_producer, registers_consumer = REGISTER_SPLIT[consumer_warpgroups]
    return ForwardConfig(
        tile_m=tile.tile_m,
        tile_n=tile.tile_n,
        head_dim=padded_head_dim(head_dim),
        head_dim_v=padded_head_dim(head_dim_v),
        consumer_warpgroups=consumer_warpgroups,
        registers_producer=registers_producer,
        registers_consumer=registers_consumer,
        p_operand=tile.p_operand,
        ping_pong=padded_head_dim(head_dim) <= PING_PONG_HEAD_DIM,
    )


def backward_config(tile: BackwardTile, head_dim: int, head_dim_v: int) -> BackwardConfig:
    """The kernel configuration of a row, with all gradients and in any order of additions."""
    registers_producer, registers_consumer = REGISTER_SPLIT[BACKWARD_CONSUMERS]
    return BackwardConfig(
        tile_m=tile.tile_m,
        tile_n=tile.tile_n,
        head_dim=padded_head_dim(head_dim),
        head_dim_v=padded_head_dim(head_dim_v),
        consumer_warpgroups=BACKWARD_CONSUMERS,
        key_warpgroups=tile.key_warpgroups,
        dq_warpgroups=tile.dq_warpgroups,
        registers_producer=registers_producer,
        registers_consumer=registers_consumer,
        stages=tile.stages,
        dq_swap_ab=tile.dq_swap_ab,
        exact_head_dim=head_dim == padded_head_dim(head_dim),
    )
