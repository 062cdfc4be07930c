"""Which CTA computes which tile of packed sequences: tables that a kernel makes from the lengths.

Lengths are values of device tensors, so the host knows only how many tiles there can be: sequence
and rows that belong to none round up at most once each. A CTA whose row of a table is empty ends.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from hopperflash.plan.arch import ArchSpec
from hopperflash.plan.config import TILE_FIELDS, TileTableConfig
from hopperflash.plan.launch_plan import NOTHING, Buffer, KernelCall, KernelRef, KernelSpec
from hopperflash.problem import AttnProblem, DType, MaskKind, Signature

TILE_TABLE = KernelRef("hopperflash.kernels.auxiliary.tile_table", "TileTable")
_OUTSIDE = 2  # what lies before the first sequence and behind the last


@dataclass(frozen=True)
class TileTables:
    """The tables of one pass; none for dense problems."""

    problem: AttnProblem
    config: TileTableConfig

    @classmethod
    def of(cls, problem: AttnProblem, config: TileTableConfig) -> TileTables:
        """The tables of `config`, with the lengths that the problem brings."""
        given = dict(problem.operands)
        seqused = ("seqused_q" in given, "seqused_k" in given)
        return cls(problem, replace(config, seqused=seqused))

    def buffers(self, *others: Buffer) -> tuple[Buffer, ...]:
        """Workspaces (tiles, fields), and then others."""
        if not self.problem.is_packed:
            return others
        tables = (
            Buffer(f"tiles_{side}", (self._tiles(side), len(TILE_FIELDS)), "int32")
            for side in ("q", "k")
            if self._tile(side) is not None
        )
        return (*tables, *others)

    def operand(self, side: str) -> str:
        """The table of blocks of "q" or "k" as a kernel's argument."""
        return f"tiles_{side}" if self.problem.is_packed else NOTHING

    def grid(self, side: str, heads: int, dense_blocks: int) -> tuple[int, int, int]:
        """CTAs of a kernel that computes one tile of one head each."""
        if not self.problem.is_packed:
            return (dense_blocks, heads, self.problem.batch)
        return (self._tiles(side) * heads, 1, 1)

    def before(self, arch: ArchSpec, calls: Iterable[KernelCall]) -> tuple[KernelCall, ...]:
        """The launch that fills the tables, and then those that read them."""
        config = self.config
        if not self.problem.is_packed:
            return tuple(calls)
        lengths = [
            name if given else NOTHING
            for name, given in zip(("seqused_q", "seqused_k"), config.seqused, strict=True)
        ]
        tables = [NOTHING if self._tile(side) is None else f"tiles_{side}" for side in ("q", "k")]
        # The table is made alike for every dtype and mask.
        anything = Signature(DType.BFLOAT16, MaskKind.FULL)
        return (
            KernelCall(
                KernelSpec(TILE_TABLE, config, anything, arch.name),
                ("cu_seqlens_q", "cu_seqlens_k", *lengths, *tables, "total_q", "total_k"),
                (len(self.buffers()), 1, 1),
            ),
            *calls,
        )

    def _tile(self, side: str) -> int | None:
        return self.config.tile_m if side == "q" else self.config.tile_n

    def _tiles(self, side: str) -> int:
        """The most tiles that sequences of any lengths can have."""
        rows = self.problem.seqlen_q if side == "q" else self.problem.seqlen_k
        tile, parts = self._tile(side), (self.problem.sequences or 0) + _OUTSIDE
        if tile is None:
            raise ValueError(f"no table of {side} blocks")
        return (rows + parts * (tile - 1)) // tile
