"""Tiles for sm_90a: one row per head dims and mask and direction, edited by hand.

Sources name the peers' tables and the compiler's verdicts on them (spills, serialised wgmma), both
read from public sources; `plan.feasibility` proves each row feasible.
"""

from __future__ import annotations

from dataclasses import dataclass

from hopperflash.plan.config import WGMMA_ROWS, BackwardConfig, ForwardConfig, POperand
from hopperflash.plan.cost import with_cheapest_factors
from hopperflash.plan.tiles import (
    ANY,
    OPEN,
    WINDOW,
    first_that_holds,
    padded_head_dim,
)
from hopperflash.problem import GRADIENTS, AttnProblem, MaskKind


@dataclass(frozen=True)
class ForwardTile:
    """One row of the forward table, for head dims up to those given; `source` says where from.

    `searched` is the day on which the search (`profiling.search --check`) last found nothing better
    for any of its masks, as far as the model can tell, and "" where it did; `source` then says why
    the row is what it is.
    """

    head_dim: int
    head_dim_v: int
    masks: tuple[MaskKind, ...]
    tile_m: int
    tile_n: int
    p_operand: POperand
    source: str
    searched: str = ""


@dataclass(frozen=True)
class BackwardTile:
    """One row of the backward table; `key_warpgroups` of the two consumers share out the keys, rows
    of S^T, or with `query_rows` columns of S; `dq_warpgroups` compute dQ, or with `dq_swap_ab` its
    transpose. With `plain_only` the row is for problems that ask for little else (`is_plain`)."""

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
    query_rows: bool = False
    plain_only: bool = False


REGS = POperand.REGISTERS

# The first row that holds both head dims counts.
FORWARD_TILES = (
    ForwardTile(64, 64, ANY, 192, 128, REGS, "FA4 at every mask; FA3 causal", "2026-11-30"),
    ForwardTile(96, 96, ANY, 192, 96, REGS, "FA3, FA4: 192; 128 keys would spill", "2026-11-30"),
    ForwardTile(128, 128, ANY, 128, 128, REGS, "FA4; least waste at edges and end", "2026-11-30"),
    ForwardTile(192, 128, ANY, 128, 128, REGS, "FA4; a narrow V leaves room", "2026-11-30"),
    ForwardTile(192, 192, OPEN, 128, 112, REGS, "FA3, FA4; the shared-memory limit", "2026-11-30"),
    ForwardTile(192, 192, WINDOW, 128, 96, REGS, "FA3, FA4; less waste at the edges", "2026-11-30"),
    ForwardTile(256, 256, OPEN, 128, 80, REGS, "FA3, FA4; the shared-memory limit", "2026-11-30"),
    ForwardTile(256, 256, WINDOW, 128, 64, REGS, "FA3, FA4; less waste at the edges", "2026-11-30"),
)

BACKWARD_TILES = (
    BackwardTile(64, 64, ANY, 128, 128, 2, 2, 2, "FA3 and FA4", "2026-11-30", plain_only=True),
    BackwardTile(64, 64, ANY, 112, 128, 2, 1, 2, "128 spills", "2026-11-30", dq_swap_ab=True),
    BackwardTile(96, 96, ANY, 64, 128, 2, 1, 2, "FA4; 128 need 248 registers", "2026-11-30"),
    BackwardTile(128, 128, ANY, 64, 128, 2, 1, 2, "FA3, FA4 causal; dQ wants 64s", "2026-11-30"),
    BackwardTile(128, 192, ANY, 64, 64, 1, 1, 2, "with 128 keys some would spill"),
    BackwardTile(192, 96, ANY, 48, 128, 2, 2, 2, "64 spills with 128", dq_swap_ab=True),
    BackwardTile(192, 128, ANY, 48, 128, 2, 2, 2, "64 spills", dq_swap_ab=True, plain_only=True),
    BackwardTile(192, 192, ANY, 64, 96, 2, 2, 2, "FA4", query_rows=True),
    BackwardTile(256, 256, ANY, 64, 64, 1, 2, 2, "FA4; the shared-memory limit", "2026-11-30"),
)

# Registers per thread of (producer, consumers) by consumer warpgroups: the split FA3 and FA4 use.
REGISTER_SPLIT = {2: (24, 240), 3: (32, 160)}
BACKWARD_CONSUMERS = 2
ITEMSIZE = 2  # of every dtype
# Up to which head dim warpgroups take turns: FA3's. Beyond, a softmax is short beside its GEMMs.
PING_PONG_HEAD_DIM = 128


def forward_tile(head_dim: int, head_dim_v: int, mask_kind: MaskKind) -> ForwardTile:
    """The row for two head dims and a mask; LookupError where the table has none."""
    return first_that_holds(FORWARD_TILES, head_dim, head_dim_v, mask_kind)


def is_plain(problem: AttnProblem) -> bool:
    """Whether a backward is for all gradients, has no cap, and is at most one of packed, with SMs
    left free and in order, which counts twice where Q and K do not fill the tile's columns: some
    tiles leave ptxas too few registers for more."""
    if problem.softcap or problem.gradients != GRADIENTS:
        return False
    narrower = problem.head_dim != padded_head_dim(problem.head_dim)
    in_order = problem.deterministic * (1 + narrower)
    return problem.is_packed + in_order + (problem.sm_margin > 0) <= 1


def backward_tile(
    head_dim: int, head_dim_v: int, mask_kind: MaskKind, plain: bool = True
) -> BackwardTile:
    """The row for two head dims and a mask of problems that are plain, or of those that are not;
    LookupError where the table has none."""
    rows = (row for row in BACKWARD_TILES if plain or not row.plain_only)
    return first_that_holds(rows, head_dim, head_dim_v, mask_kind)


def forward_config(tile: ForwardTile, head_dim: int, head_dim_v: int) -> ForwardConfig:
    """The kernel configuration of a row: 64 query rows per consumer warpgroup, and the factors of O
    where they cost least."""
    consumer_warpgroups = tile.tile_m // WGMMA_ROWS
    registers_producer, registers_consumer = REGISTER_SPLIT[consumer_warpgroups]
    config = ForwardConfig(
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
    return with_cheapest_factors(config, ITEMSIZE)


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
        query_rows=tile.query_rows,
        exact_head_dim=head_dim == padded_head_dim(head_dim),
    )
