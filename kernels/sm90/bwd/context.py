"""What a consumer warpgroup of the Hopper backward is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Constexpr, Int32

from hopperflash.plan.config import BackwardConfig

from ...common import softmax
from ...common.band import Band
from .storage import Pipelines, SmemTensors


class TiledMmas(NamedTuple):
    """One tiled MMA for each shape of result; the first three `BackwardConfig.oriented`."""

    S: cute.TiledMma  # (tile_n, tile_m): S^T and dP^T
    dV: cute.TiledMma  # (tile_n, head_dim_v)
    dK: cute.TiledMma  # (tile_n, head_dim)
    dQ: cute.TiledMma  # (tile_m, head_dim), or 64s of head dims by tile_m


@dataclass(frozen=True)
class MmaContext:
    """What a consumer warpgroup needs."""

    config: Constexpr[BackwardConfig]
    band: Band
    capped: Constexpr[bool]
    mmas: TiledMmas
    smem: SmemTensors
    pipelines: Pipelines
    releases: Any  # Releases of a cluster, else None
    consumer_tidx: Int32
    scales: softmax.Scales
