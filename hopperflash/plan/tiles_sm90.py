"""Forward tiles for sm_90a: one row per padded head dim and mask, edited by hand.

Sources name the peers' tables and the compiler's verdicts on them (spills, serialised wgmma), both
read from public sources; `plan.budget` proves each row feasible.
"""

from __future__ import annotations

from dataclasses import dataclass

from hopperflash.plan.config import ForwardConfig, POperand
from hopperflash.problem import MaskKind


@dataclass(frozen=True)
class Tile:
    """One row of the table; `head_dim` holds for Q, K and V alike, `source` says where from."""

    head_dim: int
    masks: tuple[MaskKind, ...]
    tile_m: int
    tile_n: int
    p_operand: POperand
    source: str


FULL = (MaskKind.FULL,)
CAUSAL = (MaskKind.CAUSAL,)
ANY = FULL + CAUSAL
REGS, SMEM = POperand.REGISTERS, POperand.SHARED

FORWARD_TILES = (
    Tile(64, ANY, 192, 128, REGS, "FA4 at every mask; FA3 causal"),
    Tile(96, ANY, 192, 128, SMEM, "FA4 causal; P in registers spills and serialises wgmma"),
    Tile(128, FULL, 128, 176, REGS, "FA3 full; the wider tile amortises the rescale of O"),
    Tile(128, CAUSAL, 128, 128, REGS, "FA3 and FA4; square tiles waste least on the diagonal"),
    Tile(192, ANY, 128, 112, REGS, "FA3 and FA4; the shared-memory limit"),
    Tile(256, ANY, 128, 80, REGS, "FA3 and FA4; the shared-memory limit"),
)

# Registers per thread of (producer, consumers) by consumer warpgroups: the split FA3 and FA4 use.
REGISTER_SPLIT = {2: (24, 240), 3: (32, 160)}

ROWS_PER_WARPGROUP = 64


def padded_head_dim(head_dim: int) -> int:
    """The smallest head dim of the table that holds `head_dim`; ValueError above the largest."""
    rows = [tile.head_dim for tile in FORWARD_TILES if tile.head_dim >= head_dim]
    if not rows:
        largest = max(tile.head_dim for tile in FORWARD_TILES)
        raise ValueError(f"head_dim {head_dim} exceeds the largest tile's {largest}")
    return min(rows)


def forward_tile(head_dim: int, mask_kind: MaskKind) -> Tile:
    """The row for a head dim (padded here) and mask; LookupError where the table has none."""
    padded = padded_head_dim(head_dim)
    for tile in FORWARD_TILES:
        if tile.head_dim == padded and mask_kind in tile.masks:
            return tile
    raise LookupError(f"no sm_90a forward tile for head_dim {padded}, mask {mask_kind.value}")


def forward_config(tile: Tile) -> ForwardConfig:
    """The kernel configuration that a row stands for: 64 query rows per consumer warpgroup."""
    consumer_warpgroups = tile.tile_m // ROWS_PER_WARPGROUP
    registers_producer, registers_consumer = REGISTER_SPLIT[consumer_warpgroups]
    return ForwardConfig(
        tile_m=tile.tile_m,
        tile_n=tile.tile_n,
        head_dim=tile.head_dim,
        head_dim_v=tile.head_dim,
        consumer_warpgroups=consumer_warpgroups,
        registers_producer=registers_producer,
        registers_consumer=registers_consumer,
        p_operand=tile.p_operand,
    )
