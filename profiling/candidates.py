"""What a row of the tables of tiles could be: all that the plan's arithmetic finds feasible.

A candidate is a row, so that whatever a configuration takes beside it is as planned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import product
from typing import Any

from hopperflash.plan import ArchSpec, KernelRef, feasibility, feasibility_sm80
from hopperflash.plan import tiles_sm80 as sm80
from hopperflash.plan import tiles_sm90 as sm90
from hopperflash.plan.clusters import in_cluster, sharing
from hopperflash.plan.config import (
    MMA_ROWS,
    WGMMA_ROWS,
    BackwardConfig,
    ForwardConfig,
    MainConfig,
    POperand,
)
from hopperflash.plan.cost import moved_bytes, tile_step
from hopperflash.plan.sm80 import SM80
from hopperflash.plan.sm90 import SM90
from hopperflash.plan.support import Support
from hopperflash.problem import DType
from profiling.compare_sass import ITEMSIZE, Case, blocks_of_head, plan_of_head

# Stages in order of preference: with fewer a load has less time, which the model does not see.
STAGES = (2, 1)
SM80_WARPS = (4, 8)

# What the free fields of a row may be.
AXES: Mapping[type, Mapping[str, Sequence[Any]]] = {
    sm90.ForwardTile: {
        "tile_m": [WGMMA_ROWS * consumers for consumers in sm90.REGISTER_SPLIT],
        "tile_n": range(feasibility.WGMMA_K, feasibility.WGMMA_N_MAX + 1, feasibility.WGMMA_K),
        "p_operand": tuple(POperand),
    },
    sm90.BackwardTile: {
        "tile_m": range(feasibility.WGMMA_K, feasibility.TMA_BOX_MAX + 1, feasibility.WGMMA_K),
        "tile_n": range(feasibility.WGMMA_K, feasibility.TMA_BOX_MAX + 1, feasibility.WGMMA_K),
        "key_warpgroups": range(1, sm90.BACKWARD_CONSUMERS + 1),
        "dq_warpgroups": range(1, sm90.BACKWARD_CONSUMERS + 1),
        "stages": STAGES,
        "dq_swap_ab": (False, True),
        "query_rows": (False, True),
    },
    sm80.ForwardTileSm80: {
        "tile_m": range(64, 193, 64),
        "tile_n": range(MMA_ROWS, 129, MMA_ROWS),
        "warps": SM80_WARPS,
        "q_in_registers": (False, True),
    },
    sm80.BackwardTileSm80: {
        "tile_m": range(MMA_ROWS, 129, MMA_ROWS),
        "tile_n": range(32, 129, 32),
        "warps": SM80_WARPS,
        "key_warps": (1, 2, 4, 8),
    },
}


@dataclass(frozen=True)
class Table:
    """A direction of a backend: its rows, which of them serves whom, and what becomes of a row."""

    row_type: type
    kernel: KernelRef
    rows: Callable[[ArchSpec], Sequence[Any]]
    row_for: Callable[[Case, ArchSpec, bool], Any]
    config_of: Callable[..., MainConfig]
    check: Callable[..., Support]


TABLES = {
    ("sm90", "forward"): Table(
        sm90.ForwardTile,
        SM90.forward,
        lambda _: sm90.FORWARD_TILES,
        lambda c, *_: sm90.forward_tile(c.head_dim, c.head_dim_v, c.mask),
        sm90.forward_config,
        feasibility.check,
    ),
    ("sm90", "backward"): Table(
        sm90.BackwardTile,
        SM90.backward,
        lambda _: sm90.BACKWARD_TILES,
        lambda c, _, plain: sm90.backward_tile(c.head_dim, c.head_dim_v, c.mask, plain),
        sm90.backward_config,
        feasibility.check,
    ),
    ("sm80", "forward"): Table(
        sm80.ForwardTileSm80,
        SM80.forward,
        lambda arch: sm80.table_of(arch).forward,
        lambda c, arch, _: sm80.forward_tile(c.head_dim, c.head_dim_v, c.mask, arch),
        sm80.forward_config,
        feasibility_sm80.check,
    ),
    ("sm80", "backward"): Table(
        sm80.BackwardTileSm80,
        SM80.backward,
        lambda arch: sm80.table_of(arch).backward,
        lambda c, arch, _: sm80.backward_tile(c.head_dim, c.head_dim_v, c.mask, arch),
        sm80.backward_config,
        feasibility_sm80.check,
    ),
}


def table_of(direction: str, arch: ArchSpec) -> Table:
    """The table that serves a direction on an architecture."""
    return TABLES["sm90" if "wgmma" in arch.features else "sm80", direction]


@dataclass(frozen=True)
class Candidate:
    """A row by the values of its free fields, and the configuration it gives."""

    row: tuple[tuple[str, Any], ...]
    config: MainConfig

    @property
    def name(self) -> str:
        """`128x128` and the other fields."""
        row = dict(self.row)
        others = [f"{name} {getattr(value, 'value', value)}" for name, value in self.row
                  if name not in ("tile_m", "tile_n")]  # fmt: skip
        return ", ".join([f"{row['tile_m']}x{row['tile_n']}", *others])


def planned_row(case: Case, arch: ArchSpec, plain: bool) -> Candidate:
    """The row that the table has for plain problems of a case, or for others."""
    table = table_of(case.direction, arch)
    return candidate_of(table.row_for(case, arch, plain), case, table)


def candidate_of(tile: Any, case: Case, table: Table) -> Candidate:
    """A row of a table at the head dims of a case."""
    names = {field.name for field in fields(table.row_type)}
    free = tuple((name, getattr(tile, name)) for name in AXES[table.row_type] if name in names)
    config = table.config_of(tile, case.head_dim, case.head_dim_v)
    if isinstance(config, (ForwardConfig, BackwardConfig)):
        config = in_cluster(config, sharing(config, plan_of_head(case).problem).ctas)
    return Candidate(free, config)


def enumerate_rows(case: Case, arch: ArchSpec) -> list[Candidate]:
    """All feasible rows for a case, most promising first by the plan alone; of rows that differ in
    stages only the one with most."""
    table = table_of(case.direction, arch)
    names = {field.name for field in fields(table.row_type)}
    axes = {name: values for name, values in AXES[table.row_type].items() if name in names}
    fixed = {"head_dim": case.head_dim, "head_dim_v": case.head_dim_v, "masks": (case.mask,)}
    found: dict[tuple[Any, ...], Candidate] = {}
    for values in product(*axes.values()):
        row = dict(zip(axes, values, strict=True))
        tile = table.row_type(**row, **fixed, source="")
        alone = table.config_of(tile, case.head_dim, case.head_dim_v)
        if not table.check(alone, arch, DType.BFLOAT16):
            continue
        candidate = candidate_of(tile, case, table)
        if table.check(candidate.config, arch, DType.BFLOAT16):
            apart = tuple(value for name, value in row.items() if name != "stages")
            found.setdefault(apart, candidate)
    return sorted(found.values(), key=lambda candidate: _promise(case, candidate.config))


def _promise(case: Case, config: MainConfig) -> tuple[float, ...]:
    """What orders candidates before they are compiled: the model's clocks of a head and then its
    instructions, or, of Ampere, which has no model, the bytes asked of L2."""
    steps = blocks_of_head(case, config.tile_m, config.tile_n).visited
    if not isinstance(config, (ForwardConfig, BackwardConfig)):
        return (steps * moved_bytes(config, ITEMSIZE).l2, steps, config.tile_m)
    step = tile_step(config, ITEMSIZE)
    return (steps * step.units.bound.clocks, steps * step.instructions, config.tile_m)
