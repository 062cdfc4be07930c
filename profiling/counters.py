"""What the kernels of one pass move and multiply, counted in the emulator over one head.

Heads and batch entries do the same work, so a whole problem is one head times their number. Without
a mask all CTAs of a launch but its last cluster do the same too, and only the first and the last
are executed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import prod
from typing import Any, NamedTuple

import torch

import hopperflash
from hopperflash.emulator import EmulationRun, launch
from hopperflash.plan import arch_of
from hopperflash.plan.block_range import Tiling, key_block_range, query_block_range
from hopperflash.problem import Direction, MaskKind, MaskSpec
from hopperflash.runtime.emulation import EmulationSession, resumed

ITEMSIZE = 2
STATISTICS_BYTES = 8  # LSE and delta of a row, fp32


@dataclass(frozen=True)
class Head:
    """One direction of one head: `seqlen` queries and keys of `head_dim`, bf16."""

    direction: Direction
    head_dim: int
    mask: MaskSpec
    seqlen: int

    @property
    def is_alike(self) -> bool:
        """Whether all CTAs but those at the end do the same work."""
        return self.mask.kind is MaskKind.FULL

    def tensors(self) -> dict[str, torch.Tensor]:
        """Operands (batch, seqlen, heads, head dim), and what a forward would have returned."""
        shape = (1, self.seqlen, 1, self.head_dim)
        tensors = {name: torch.randn(shape).bfloat16() for name in ("q", "k", "v", "out", "dout")}
        return tensors | {"lse": torch.randn(1, 1, self.seqlen)}

    @property
    def gemms(self) -> int:
        """Of two FLOPs for each element of a head dim and each pair."""
        return 2 if self.direction == "forward" else 5


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
        h = self.head
        tile = self.tile_m * self.tile_n
        return self.flops / (2 * h.gemms * h.head_dim * tile * self._visited) - 1

    @property
    def over_visible(self) -> float:
        """Tensor work over that of the visible pairs."""
        h = self.head
        pairs = h.mask.visible_pairs(h.seqlen, h.seqlen)
        return self.flops / (2 * h.gemms * h.head_dim * pairs)

    @property
    def loads_per_tile(self) -> float:
        """How often what a step streams is read for each tile with a visible pair: K and V of a
        forward, Q, dO and the row statistics of a backward. Below 1 where CTAs share loads."""
        h, row = self.head, 2 * self.head.head_dim * ITEMSIZE
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


def count_launch(compiled: Any, *args: Any, alike: bool, **options: Any) -> LaunchCount:
    """What one call of a compiled kernel does; `alike`: all its clusters but the last are."""

    def run(index: tuple[int, int, int] | None) -> EmulationRun:
        chosen = None if index is None else lambda cta: cta == index
        settings = {**options, "schedule": "eager", "hazards": "basic", "ctas": chosen}
        return launch(compiled, *args, **settings)

    if not alike:
        return _counted(run(None).counters)
    first = run((0, 0, 0))
    (info,) = first.launches
    x, y, z = info.grid
    last = run((x - 1, y - 1, z - 1))
    times, rest = divmod(prod(info.grid) - last.launches[0].ctas_run, info.ctas_run)
    if rest:
        raise ValueError(f"grid {info.grid} is not made of clusters of {info.ctas_run}")
    pairs = zip(_counted(first.counters), _counted(last.counters), strict=True)
    return LaunchCount(*(times * of_first + of_last for of_first, of_last in pairs))


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
    alike: bool = False
    launches: list[LaunchCount] = field(default_factory=list)

    def launch(self, kernel: Any, operands: Any) -> None:
        self.launches.append(count_launch(kernel, *operands, alike=self.alike))


def count_ours(head: Head, *, alike: bool | None = None) -> PassCount:
    """What the planned kernels do; `alike` as of `count_launch`, by default without a mask."""
    mask, x = head.mask, head.tensors()
    band = tuple(-1 if bound is None else bound for bound in (mask.left, mask.right))
    inputs = (x["q"], x["k"], x["v"])
    sampled = head.is_alike if alike is None else alike
    session = _Counting(arch_of("sm_90a"), "eager", 0, "basic", alike=sampled)
    with resumed(session):
        if head.direction == "forward":
            hopperflash.flash_attn_func(*inputs, window_size=band)
        else:
            hopperflash.flash_attn_backward(x["dout"], *inputs, x["out"], x["lse"],
                                            window_size=band)  # fmt: skip
    plan = hopperflash.make_plan(*inputs, arch="sm_90a", direction=head.direction, window_size=band)
    configs = [call.spec.config for call in plan.calls]
    multiplies = max(session.launches, key=lambda found: found.flops)
    config: Any = configs[session.launches.index(multiplies)]
    return PassCount(head, config.tile_m, config.tile_n, tuple(session.launches))


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
