"""What the kernels of one pass move and multiply, counted in the emulator over one head.

Heads and batch entries do the same work, so a whole problem is one head times their number. Along
the blocks of a head the work of a CTA follows the bounds of its loop, which are minima of lines: of
every `period` blocks it is concave. A concave sequence that meets its chord in the middle is the
chord, so its ends and its middle stand for all, or its halves are looked at: few CTAs are executed
and the sums are exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch

import hopperflash
from hopperflash.emulator import EmulationRun, launch
from hopperflash.plan import LaunchPlan, arch_of
from hopperflash.plan.block_range import Tiling, key_block_range, query_block_range
from hopperflash.plan.config import MainConfig, cluster_of
from hopperflash.problem import Direction, MaskSpec
from hopperflash.runtime.emulation import EmulationSession, resumed

ITEMSIZE = 2
STATISTICS_BYTES = 8  # LSE and delta of a row, fp32


@dataclass(frozen=True)
class Head:
    """One direction of one head: `seqlen` queries and keys of `head_dim`, values of `head_dim_v`,
    bf16."""

    direction: Direction
    head_dim: int
    head_dim_v: int
    mask: MaskSpec
    seqlen: int

    def tensors(self) -> dict[str, torch.Tensor]:
        """Operands (batch, seqlen, heads, head dim), and what a forward would have returned."""
        sizes = dict.fromkeys(("q", "k"), self.head_dim)
        sizes |= dict.fromkeys(("v", "out", "dout"), self.head_dim_v)
        tensors = {x: torch.randn(1, self.seqlen, 1, size).bfloat16() for x, size in sizes.items()}
        return tensors | {"lse": torch.randn(1, 1, self.seqlen)}

    @property
    def pair_flops(self) -> int:
        """Of a query and a key: S and O, or S, dQ and dK, dP and dV."""
        d, dv = self.head_dim, self.head_dim_v
        return 2 * (d + dv) if self.direction == "forward" else 2 * (3 * d + 2 * dv)


class LaunchCount(NamedTuple):
    """One launch, all its CTAs: bytes of global memory, and FLOPs of the tensor cores."""

    ctas: int
    read: int
    written: int
    reduced: int
    flops: int


@dataclass(frozen=True)
class PassCount:
    """The launches of a pass; the tile is that of the one that multiplies."""

    head: Head
    tile_m: int
    tile_n: int
    launches: tuple[LaunchCount, ...]

    @property
    def main(self) -> LaunchCount:
        """The launch that multiplies."""
        return max(self.launches, key=lambda found: found.flops)

    @property
    def bytes(self) -> int:
        """Read, written and reduced by all launches."""
        return sum(found.read + found.written + found.reduced for found in self.launches)

    @property
    def flops(self) -> int:
        return sum(found.flops for found in self.launches)

    @property
    def beyond(self) -> float:
        """Tensor work beyond that of the tiles with a visible pair, over the latter."""
        tile = self.tile_m * self.tile_n
        return self.flops / (self.head.pair_flops * tile * self._visited) - 1

    @property
    def over_visible(self) -> float:
        """Tensor work over that of the visible pairs."""
        h = self.head
        pairs = h.mask.visible_pairs(h.seqlen, h.seqlen)
        return self.flops / (h.pair_flops * pairs)

    @property
    def loads_per_tile(self) -> float:
        """How often what a step streams is read for each tile with a visible pair: K and V of a
        forward, Q, dO and the row statistics of a backward. Below 1 where CTAs share loads."""
        h, row = self.head, (self.head.head_dim + self.head.head_dim_v) * ITEMSIZE
        if h.direction == "forward":
            kept, statistics = h.seqlen * h.head_dim * ITEMSIZE, 0
        else:
            kept, statistics = h.seqlen * row, self._visited * self.tile_m * STATISTICS_BYTES
        return (self.main.read - kept) / (self._streamed_rows * row + statistics)

    @property
    def _tiling(self) -> Tiling:
        return Tiling(self.head.seqlen, self.head.seqlen, self.tile_m, self.tile_n)

    @property
    def _visited(self) -> int:
        """Tiles with a visible pair."""
        mask, t = self.head.mask, self._tiling
        return sum(key_block_range(mask, m, t).visited for m in range(t.m_blocks))

    @property
    def _streamed_rows(self) -> int:
        """Rows of the blocks that steps stream, of which only the last may be partial."""
        mask, t = self.head.mask, self._tiling
        if self.head.direction == "forward":
            step, found = t.tile_n, [key_block_range(mask, m, t) for m in range(t.m_blocks)]
        else:
            step, found = t.tile_m, [query_block_range(mask, n, t) for n in range(t.n_blocks)]
        return sum(min(r.end * step, t.seqlen_k) - r.begin * step for r in found)


def period_of(direction: Direction, tile_m: int, tile_n: int) -> int:
    """After how many blocks the bounds of a kernel's loop have moved by whole blocks."""
    step = tile_n if direction == "forward" else tile_m
    return step // math.gcd(tile_m, tile_n)


def count_launch(compiled: Any, *args: Any, period: int, **options: Any) -> LaunchCount:
    """What one call of a compiled kernel does, of whose CTAs few are executed."""
    settings = {**options, "schedule": "eager", "hazards": "basic"}

    @cache
    def run(cluster: int) -> EmulationRun:
        start = (cluster * size, 0, 0)
        return launch(compiled, *args, ctas=lambda index: index == start, **settings)

    size = 1
    (info,) = run(0).launches
    (ctas, *others), size = info.grid, info.cluster[0]
    if others != [1, 1]:
        raise ValueError(f"grid {info.grid}: blocks of one head go along x")
    clusters = range(ctas // size)
    parts = [concave_sum(lambda i: _counted(run(i).counters), clusters[start::period])
             for start in range(min(period, len(clusters)))]  # fmt: skip
    return LaunchCount(*map(sum, zip(*parts, strict=True)))


def concave_sum(count: Callable[[int], LaunchCount], indices: range) -> LaunchCount:
    """The sum of counts that are concave in the index."""
    middle, end = len(indices) // 2, len(indices) - 1
    if end < 2:
        return LaunchCount(*map(sum, zip(*map(count, indices), strict=True)))
    first, found, last = (count(indices[i]) for i in (0, middle, end))
    rises = zip(first, found, last, strict=True)
    if all((b - a) * end == (c - a) * middle for a, b, c in rises):
        return LaunchCount(*((a + c) * len(indices) // 2 for a, c in zip(first, last, strict=True)))
    halves = (concave_sum(count, indices[:middle]), concave_sum(count, indices[middle:]))
    return LaunchCount(*map(sum, zip(*halves, strict=True)))


def _counted(c: Mapping[str, int]) -> LaunchCount:
    reduced = c["tma_reduce_bytes"] + c["global_atomic_bytes"]
    return LaunchCount(
        ctas=c["ctas"],
        read=c["tma_load_bytes"] + c["global_load_bytes"],
        # Stores by TMA include its reductions.
        written=c["tma_store_bytes"] - c["tma_reduce_bytes"] + c["global_store_bytes"],
        reduced=reduced,
        flops=c["wgmma_flops"] + c["mma_flops"],
    )


@dataclass(frozen=True)
class _Counting(EmulationSession):
    period: int = 1
    launches: list[LaunchCount] = field(default_factory=list)

    def launch(self, kernel: Any, operands: Any) -> None:
        self.launches.append(count_launch(kernel, *operands, period=self.period))


def count_ours(head: Head) -> PassCount:
    """What the planned kernels do."""
    mask, x = head.mask, head.tensors()
    band = tuple(-1 if bound is None else bound for bound in (mask.left, mask.right))
    inputs = (x["q"], x["k"], x["v"])
    plan = hopperflash.make_plan(*inputs, arch="sm_90a", direction=head.direction, window_size=band)
    config = _main_config(plan)
    tile = (config.tile_m, config.tile_n)
    period = period_of(head.direction, *tile)
    session = _Counting(arch_of("sm_90a"), "eager", 0, "basic", period=period)
    with resumed(session):
        if head.direction == "forward":
            hopperflash.flash_attn_func(*inputs, window_size=band)
        else:
            hopperflash.flash_attn_backward(x["dout"], *inputs, x["out"], x["lse"],
                                            window_size=band)  # fmt: skip
    return PassCount(head, *tile, tuple(session.launches))


def planned_launches(found: PassCount, batch: int, heads: int) -> int:
    """Launches for so many heads: of kernels, and those that zero a counter of tiles. Another
    scheduler does the same for each tile; ValueError where tiles or clusters are other than those
    that were counted."""
    head = found.head
    band = tuple(-1 if bound is None else bound for bound in (head.mask.left, head.mask.right))

    def plan(batch: int, heads: int) -> LaunchPlan:
        qk, v = (
            torch.empty(batch, head.seqlen, heads, size, dtype=torch.bfloat16, device="meta")
            for size in (head.head_dim, head.head_dim_v)
        )
        return hopperflash.make_plan(
            qk, qk, v, arch="sm_90a", direction=head.direction, window_size=band
        )

    def tiles(plan: LaunchPlan) -> tuple[int, int, int]:
        config = _main_config(plan)
        return config.tile_m, config.tile_n, cluster_of(config)

    whole, one = plan(batch, heads), plan(1, 1)
    if tiles(whole) != tiles(one):
        raise ValueError(f"{head}: tiles and clusters {tiles(whole)}, of one head {tiles(one)}")
    return len(whole.calls) + sum(buffer.zeroed for buffer in whole.steps.workspaces)


def _main_config(plan: LaunchPlan) -> MainConfig:
    (config,) = (c.spec.config for c in plan.calls if isinstance(c.spec.config, MainConfig))
    return config


def as_json(found: PassCount) -> dict[str, Any]:
    """A record that `from_json` reads."""
    return asdict(found) | {"launches": [tuple(each) for each in found.launches]}


def from_json(record: Mapping[str, Any]) -> PassCount:
    """What `as_json` wrote."""
    head = record["head"]
    return PassCount(
        Head(**{**head, "mask": MaskSpec(**head["mask"])}),
        record["tile_m"],
        record["tile_n"],
        tuple(LaunchCount(*each) for each in record["launches"]),
    )
