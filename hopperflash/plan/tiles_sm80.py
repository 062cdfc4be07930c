"""Tiles for the Ampere kernels: a table by shared memory, one row per head dims and direction.

Edited by hand. Sources name the peers' tables (FA2, FA3, public sources) and what ptxas 13 of the
DSL said of the row: registers per thread, all without spills, and what a larger tile would do.
`plan.feasibility_sm80` proves each row feasible.
"""

from __future__ import annotations

from dataclasses import dataclass

from hopperflash.plan.arch import ArchSpec
from hopperflash.plan.config import BackwardConfigSm80, ForwardConfigSm80
from hopperflash.plan.tiles import ANY, first_that_holds, padded_head_dim
from hopperflash.problem import MaskKind


@dataclass(frozen=True)
class ForwardTileSm80:
    """One row of a forward table, for head dims up to those given; `source` says where from."""

    head_dim: int
    head_dim_v: int
    tile_m: int
    tile_n: int
    warps: int
    q_in_registers: bool
    source: str
    masks: tuple[MaskKind, ...] = ANY


@dataclass(frozen=True)
class BackwardTileSm80:
    """One row of a backward table; `key_warps` of the warps stack along the keys."""

    head_dim: int
    head_dim_v: int
    tile_m: int
    tile_n: int
    warps: int
    key_warps: int
    source: str
    masks: tuple[MaskKind, ...] = ANY


@dataclass(frozen=True)
class TileTable:
    """Rows for parts with `smem_bytes` or more per block; the first that holds both counts."""

    smem_bytes: int
    forward: tuple[ForwardTileSm80, ...]
    backward: tuple[BackwardTileSm80, ...]


# sm_80, sm_87, and newer parts that have no backend of their own (sm_100, sm_103).
LARGE = TileTable(
    smem_bytes=163 * 1024,
    forward=(
        ForwardTileSm80(64, 64, 128, 64, 4, True, "FA3's 128x112 would spill; 235 registers"),
        ForwardTileSm80(96, 96, 128, 64, 4, False, "FA2 and FA3; 253 registers"),
        ForwardTileSm80(128, 128, 128, 64, 8, True, "FA2; 4 warps would spill; 218 registers"),
        ForwardTileSm80(192, 192, 128, 64, 8, True, "FA2; FA3's Q in registers; 243 registers"),
        ForwardTileSm80(256, 128, 128, 64, 8, False, "the shared-memory limit"),
        ForwardTileSm80(128, 256, 128, 64, 8, False, "the shared-memory limit"),
        ForwardTileSm80(256, 256, 128, 32, 8, False, "64 keys in two stages would need 192 KiB"),
    ),
    backward=(
        BackwardTileSm80(64, 64, 64, 128, 8, 8, "FA3 on sm_86; 254 registers"),
        BackwardTileSm80(96, 96, 64, 128, 8, 8, "FA2 and FA3; 245 registers"),
        BackwardTileSm80(128, 128, 64, 128, 8, 8, "FA2 and FA3; 255 registers"),
        BackwardTileSm80(192, 192, 64, 64, 8, 4, "FA2; 241 registers"),
        BackwardTileSm80(256, 128, 64, 64, 8, 4, "FA2; the shared-memory limit"),
        BackwardTileSm80(128, 256, 64, 64, 8, 4, "FA2; the shared-memory limit"),
        BackwardTileSm80(256, 256, 32, 64, 8, 4, "64 queries would need 200 KiB; 232 registers"),
    ),
)
# sm_86, sm_89, sm_120, sm_121.
SMALL = TileTable(
    smem_bytes=99 * 1024,
    forward=(
        *LARGE.forward[:3],
        ForwardTileSm80(192, 96, 64, 64, 4, False, "the shared-memory limit"),
        ForwardTileSm80(96, 192, 64, 64, 4, False, "the shared-memory limit"),
        ForwardTileSm80(192, 192, 64, 48, 4, False, "the shared-memory limit"),
        ForwardTileSm80(256, 256, 64, 32, 4, False, "the shared-memory limit"),
    ),
    backward=(
        BackwardTileSm80(64, 64, 64, 128, 8, 8, "FA3; 254 registers"),
        BackwardTileSm80(96, 96, 64, 64, 8, 4, "64x128 would need 112 KiB; 136 registers"),
        BackwardTileSm80(128, 96, 64, 64, 8, 4, "the shared-memory limit"),
        BackwardTileSm80(96, 128, 64, 64, 8, 4, "the shared-memory limit"),
        BackwardTileSm80(128, 128, 32, 64, 8, 4, "64 queries would need 104 KiB; 238 registers"),
        BackwardTileSm80(192, 192, 32, 32, 4, 2, "the shared-memory limit; 255 registers"),
        BackwardTileSm80(256, 256, 32, 32, 4, 2, "the shared-memory limit; 252 registers"),
    ),
)
TABLES = (LARGE, SMALL)


def table_of(arch: ArchSpec) -> TileTable:
    """The table for the shared memory of `arch`; LookupError where there is none so small."""
    for table in TABLES:
        if arch.smem_bytes_per_block >= table.smem_bytes:
            return table
    raise LookupError(f"no tiles for {arch.smem_bytes_per_block} B of shared memory per block")


def forward_tile(
    head_dim: int, head_dim_v: int, mask_kind: MaskKind, arch: ArchSpec
) -> ForwardTileSm80:
    """The row for two head dims and a mask; LookupError where the table has none."""
    return first_that_holds(table_of(arch).forward, head_dim, head_dim_v, mask_kind)


def backward_tile(
    head_dim: int, head_dim_v: int, mask_kind: MaskKind, arch: ArchSpec
) -> BackwardTileSm80:
    """The row for two head dims and a mask; LookupError where the table has none."""
    return first_that_holds(table_of(arch).backward, head_dim, head_dim_v, mask_kind)


def forward_config(tile: ForwardTileSm80, head_dim: int, head_dim_v: int) -> ForwardConfigSm80:
    """The kernel configuration of a row."""
    return ForwardConfigSm80(
        tile_m=tile.tile_m,
        tile_n=tile.tile_n,
        head_dim=padded_head_dim(head_dim),
        head_dim_v=padded_head_dim(head_dim_v),
        warps=tile.warps,
        q_in_registers=tile.q_in_registers,
    )


def backward_config(tile: BackwardTileSm80, head_dim: int, head_dim_v: int) -> BackwardConfigSm80:
    """The kernel configuration of a row, with all gradients and in any order of additions."""
    return BackwardConfigSm80(
        tile_m=tile.tile_m,
        tile_n=tile.tile_n,
        head_dim=padded_head_dim(head_dim),
        head_dim_v=padded_head_dim(head_dim_v),
        warps=tile.warps,
        key_warps=tile.key_warps,
    )
