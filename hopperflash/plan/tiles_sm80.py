"""Tiles for the Ampere kernels: a table by generation and shared memory, a row per head dims.

Edited by hand. Sources name the peers' tables (FA2, FA3, public sources) and what ptxas 13 of the
DSL said of a larger tile; `docs/forward_sm80.md` and `docs/backward_sm80.md` have the registers.
`plan.feasibility_sm80` proves each row feasible.
"""

from __future__ import annotations

from dataclasses import dataclass

from hopperflash.plan.arch import ArchSpec
from hopperflash.plan.config import BackwardConfigSm80, ForwardConfigSm80
from hopperflash.plan.tiles import (
    ANY,
    BANDED,
    OPEN,
    WINDOW,
    first_that_holds,
    padded_head_dim,
)
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
    """Rows for parts of `generation` or later with `smem_bytes` or more per block.

    The first row that holds both head dims counts.
    """

    generation: int
    """Major compute capability: the compiler needs more registers for later ones."""
    smem_bytes: int
    forward: tuple[ForwardTileSm80, ...]
    backward: tuple[BackwardTileSm80, ...]


# sm_80, sm_87.
LARGE = TileTable(
    generation=8,
    smem_bytes=163 * 1024,
    forward=(
        ForwardTileSm80(64, 64, 128, 64, 4, True, "FA3's 128x112 would spill"),
        ForwardTileSm80(128, 128, 128, 64, 8, True, "FA2; 4 warps spill from 96"),
        ForwardTileSm80(192, 192, 128, 64, 8, True, "FA2; FA3's Q in registers"),
        ForwardTileSm80(256, 128, 128, 64, 8, False, "the shared-memory limit"),
        ForwardTileSm80(128, 256, 128, 64, 8, False, "the shared-memory limit"),
        ForwardTileSm80(256, 256, 128, 32, 8, False, "64 keys in two stages would need 192 KiB"),
    ),
    backward=(
        BackwardTileSm80(64, 64, 64, 128, 8, 8, "FA3 on sm_86"),
        BackwardTileSm80(128, 64, 64, 64, 8, 4, "64x128 spills in fp16"),
        BackwardTileSm80(96, 96, 64, 128, 8, 8, "FA2 and FA3", BANDED),
        BackwardTileSm80(128, 96, 64, 64, 8, 4, "64x128 spills in fp16, at 96 without a mask"),
        BackwardTileSm80(128, 128, 64, 128, 8, 8, "FA2 and FA3", OPEN),
        BackwardTileSm80(128, 128, 64, 64, 8, 4, "64x128 spills: caps, packed, in order", WINDOW),
        BackwardTileSm80(192, 192, 64, 64, 8, 4, "FA2"),
        BackwardTileSm80(256, 64, 32, 64, 8, 4, "64 queries spill: causal, packed", WINDOW),
        BackwardTileSm80(256, 128, 64, 64, 8, 4, "FA2; the shared-memory limit"),
        BackwardTileSm80(128, 256, 64, 64, 8, 4, "FA2; the shared-memory limit"),
        BackwardTileSm80(256, 256, 32, 64, 8, 4, "64 queries would need 200 KiB"),
    ),
)
# sm_86, sm_89.
SMALL = TileTable(
    generation=8,
    smem_bytes=99 * 1024,
    forward=(
        *LARGE.forward[:2],
        ForwardTileSm80(192, 96, 64, 64, 4, False, "the shared-memory limit"),
        ForwardTileSm80(96, 192, 64, 64, 4, False, "the shared-memory limit"),
        ForwardTileSm80(192, 192, 64, 48, 4, False, "the shared-memory limit"),
        ForwardTileSm80(256, 256, 64, 32, 4, False, "the shared-memory limit"),
    ),
    backward=(
        BackwardTileSm80(64, 64, 64, 128, 8, 8, "FA3"),
        BackwardTileSm80(96, 96, 64, 64, 8, 4, "64x128 would need 112 KiB"),
        BackwardTileSm80(128, 96, 64, 64, 8, 4, "the shared-memory limit"),
        BackwardTileSm80(96, 128, 64, 64, 8, 4, "the shared-memory limit"),
        BackwardTileSm80(128, 128, 32, 64, 8, 4, "64 queries would need 104 KiB"),
        BackwardTileSm80(256, 96, 32, 32, 4, 2, "8 warps cannot share 96 columns"),
        BackwardTileSm80(96, 256, 32, 32, 4, 2, "8 warps cannot share 96 columns"),
        BackwardTileSm80(192, 192, 32, 32, 8, 2, "the shared-memory limit"),
        BackwardTileSm80(256, 256, 32, 32, 8, 2, "4 warps spill on sm_120"),
    ),
)
# Parts without a backend of their own (sm_100, sm_103), and sm_90 where it is asked for.
NEWER_LARGE = TileTable(
    generation=9,
    smem_bytes=LARGE.smem_bytes,
    # 64 with 4 warps spills on sm_100 and sm_120: the row of 128 serves it.
    forward=LARGE.forward[1:],
    backward=(
        *LARGE.backward[:3],
        BackwardTileSm80(128, 128, 64, 64, 8, 4, "64x128 spills on sm_100"),
        *LARGE.backward[6:-1],
        BackwardTileSm80(256, 256, 32, 32, 8, 2, "32x64 spills on sm_100: a window and a cap"),
    ),
)
# sm_120, sm_121.
NEWER_SMALL = TileTable(
    generation=9,
    smem_bytes=SMALL.smem_bytes,
    forward=SMALL.forward[1:],
    backward=SMALL.backward,
)
TABLES = (NEWER_LARGE, NEWER_SMALL, LARGE, SMALL)


def table_of(arch: ArchSpec) -> TileTable:
    """The table for the generation and the shared memory of `arch`.

    LookupError where there is none so small.
    """
    for table in TABLES:
        new_enough = arch.compute_capability[0] >= table.generation
        if new_enough and arch.smem_bytes_per_block >= table.smem_bytes:
            return table
    raise LookupError(f"no tiles for {arch.smem_bytes_per_block} B of shared memory per block")


def forward_tile(
    head_dim: int, head_dim_v: int, mask_kind: MaskKind, arch: ArchSpec
) -> ForwardTileSm80:
    """The row for two head dims and a mask; LookupError where the table has none."""
    return first_that_holds(table_of(arch).forward, head_dim, head_dim_v, mask_kind)


def backward_tile(
    head_dim: int, head_dim_v: int, mask_kind: MaskKind, arch: ArchSpec, packed: bool = False
) -> BackwardTileSm80:
    """The row for two head dims and a mask; LookupError where the table has none.

    Packed, a causal mask takes as many registers as a window.
    """
    if packed and mask_kind is MaskKind.CAUSAL:
        mask_kind = MaskKind.WINDOW
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
