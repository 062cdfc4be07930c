"""A kernel that notes which tile each CTA computes, and nothing else."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from hopperflash.kernels.common.band import Seqlens
from hopperflash.kernels.common.work import AssignedTile, Tiles, Walk, for_each_tile, grid

from hopperflash.plan.config import Scheduler


class TileOrderKernel:
    """A thread a CTA: (block, head, batch, CTA) of every tile, in the row of its number."""

    def __init__(
        self, scheduler: Scheduler, descending: bool, swizzled: bool, cluster: int = 1
    ) -> None:
        self.scheduler, self.descending = scheduler, descending
        self.swizzled, self.cluster = swizzled, cluster

    @cute.jit
    def __call__(
        self,
        mFound: cute.Tensor,  # (tiles, 8) int32 out: four of a row
        blocks: Int32,
        heads: Int32,
        batch: Int32,
        head_swizzle: Int32,
        max_ctas: Int32,
        stream: Any,
    ) -> None:
        seqlens = Seqlens(Int32(0), Int32(0))
        tiles = Tiles(None, blocks, heads, batch, seqlens, head_swizzle)
        self.kernel(mFound, tiles).launch(
            grid=grid(tiles, self.scheduler, max_ctas),
            block=(1, 1, 1),
            cluster=(self.cluster, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(self, mFound: cute.Tensor, tiles: Tiles) -> None:
        walk = Walk(self.scheduler, self.descending, self.swizzled, self.cluster, tiles)
        for_each_tile(walk, note, (mFound, self.scheduler, self.cluster), None)


@cute.jit
def note(ctx: tuple[cute.Tensor, Any], tile: AssignedTile, state: None) -> None:
    """A row for one tile."""
    mFound, scheduler, cluster = ctx
    cta, row, layer = cute.arch.block_idx()
    number = tile.number * cluster + cta % cluster
    if cutlass.const_expr(scheduler is Scheduler.SINGLE):
        ctas, rows, _ = cute.arch.grid_dim()
        number = (layer * rows + row) * ctas + cta
        cta = number
    for i, value in enumerate((tile.block, tile.head, tile.sequence.batch, cta)):
        mFound[number, i] = value
