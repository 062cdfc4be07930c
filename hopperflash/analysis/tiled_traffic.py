"""Bytes that a plan's kernels move through global memory, by what they move.

Rows and columns past the end of a tensor are not moved; rows of what is padded to whole tiles are:
row statistics, and the sums of dQ where they lie in tiles.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from hopperflash.analysis.traffic import Traffic
from hopperflash.plan import ArchSpec, KernelCall, LaunchPlan
from hopperflash.plan.block_range import (
    BlockRange,
    Tiling,
    key_block_range,
    query_block_range,
)
from hopperflash.plan.config import (
    AccumulatorOrder,
    BackwardConfig,
    BackwardConfigSm80,
    ForwardConfig,
    ForwardConfigSm80,
    MainConfig,
    PostprocessConfig,
    PreprocessConfig,
    cluster_of,
)
from hopperflash.problem import AttnProblem

_FP32 = 4
# Of dQ, the rows that one thread reads at a time.
_ROWS_APART = {AccumulatorOrder.FRAGMENTS: 8, AccumulatorOrder.TRANSPOSED: 1}
_STATISTICS = 2  # LSE in base 2 and delta, for every row a backward reads


@dataclass(frozen=True)
class Stream:
    """One operand of one kernel; `loaded` and `stored` are bytes asked for, `once` those of the
    operand itself. Sums in memory count as stored. `sharers` CTAs ask for the same bytes."""

    kernel: str
    operand: str
    loaded: int = 0
    stored: int = 0
    once: int = 0
    sharers: int = 1

    def reaching_memory(self, passes: int) -> Traffic:
        """Where an operand leaves the cache before its last use, but for so many passes over it."""
        return Traffic(min(self.loaded, passes * self.once), min(self.stored, passes * self.once))


@dataclass(frozen=True)
class L2:
    """The cache that all SMs share, in front of memory; a CTA occupies an SM."""

    bytes: int
    sms: int

    @classmethod
    def of(cls, arch: ArchSpec) -> L2:
        """That of a device, or of a target's common part."""
        return cls(arch.l2_bytes, arch.sms)


@dataclass(frozen=True)
class TiledTraffic:
    """What the kernels of a plan move; CTAs of one of `groups` share what they stream."""

    streams: tuple[Stream, ...]
    groups: int

    @property
    def asked(self) -> Traffic:
        """All that kernels load and store: what reaches memory where no cache helps."""
        return _sum(Traffic(stream.loaded, stream.stored) for stream in self.streams)

    @property
    def once(self) -> Traffic:
        """Every operand of every kernel once: what reaches memory at least."""
        return _sum(stream.reaching_memory(1) for stream in self.streams)

    def behind(self, l2: L2) -> Traffic:
        """What reaches memory behind a cache.

        CTAs at work on the same group ask for the same blocks at about the same time, and only the
        first of them goes to memory. What a group streams stays for the next wave of its CTAs if
        that of all groups at work fits into half of the cache, the other half being for what passes
        through; else every wave is another pass.
        """
        return _sum(stream.reaching_memory(self._passes(stream, l2)) for stream in self.streams)

    def _passes(self, stream: Stream, l2: L2) -> int:
        if stream.sharers == 1:
            return 1
        groups = min(self.groups, -(-l2.sms // stream.sharers))
        shared = [x.once for x in self.streams if x.kernel == stream.kernel and x.sharers > 1]
        at_work = groups * sum(shared) // self.groups
        return 1 if at_work <= l2.bytes // 2 else -(-stream.sharers // l2.sms)


def tiled_traffic(plan: LaunchPlan) -> TiledTraffic:
    """The traffic of a plan of dense operands; ValueError for packed ones, whose lengths are values
    of tensors, and where nothing is launched."""
    if not plan.calls:
        raise ValueError("nothing is launched")
    return call_traffic(plan, *plan.calls)


def call_traffic(plan: LaunchPlan, *calls: KernelCall) -> TiledTraffic:
    """The traffic of some of a plan's launches, over dense operands."""
    if plan.problem.is_packed:
        raise ValueError("only launches over dense operands have a traffic that is known ahead")
    streams = tuple(stream for call in calls for stream in _of_call(plan, call))
    return TiledTraffic(streams, plan.problem.batch * plan.problem.heads_k)


def _of_call(plan: LaunchPlan, call: KernelCall) -> Iterator[Stream]:
    config, problem = call.spec.config, plan.problem
    if isinstance(config, (ForwardConfig, ForwardConfigSm80)):
        return _forward(config, problem)
    if isinstance(config, (BackwardConfig, BackwardConfigSm80)):
        return _backward(config, problem)
    if isinstance(config, PreprocessConfig):
        return _preprocess(config, problem)
    if isinstance(config, PostprocessConfig):
        return _postprocess(config, problem)
    raise ValueError(f"no model of what {call.spec.ref.name} moves")


def _forward(config: ForwardConfig | ForwardConfigSm80, problem: AttnProblem) -> Iterator[Stream]:
    """Q and the results once, Q of tiles that see keys; K and V once for every tile, or cluster of
    tiles, that sees them."""
    p, itemsize = problem, problem.dtype.itemsize
    ctas = cluster_of(config)
    tiling, loading = (
        Tiling(p.seqlen_q, p.seqlen_k, queries, config.tile_n)
        for queries in (config.queries, config.queries * ctas)
    )
    ranges, loaded_ranges = (
        [key_block_range(p.mask, m, tiles) for m in range(tiles.m_blocks)]
        for tiles in (tiling, loading)
    )
    rows = _rows(loaded_ranges, config.tile_n, p.seqlen_k) * p.batch * (p.heads_q // config.group)
    sharers = loading.m_blocks * ctas * p.group // config.group
    queries, keys = p.batch * p.heads_q * p.seqlen_q, p.batch * p.heads_k * p.seqlen_k
    seeing = [BlockRange(m, m, m, m + 1) for m, found in enumerate(ranges) if found.visited]
    seeing_rows = _rows(seeing, config.queries, p.seqlen_q) * p.batch * p.heads_q
    q, out = seeing_rows * p.head_dim * itemsize, queries * p.head_dim_v * itemsize
    yield Stream("forward", "Q", loaded=q, once=q)
    for name, dim in (("K", p.head_dim), ("V", p.head_dim_v)):
        loaded, once = rows * dim * itemsize, keys * dim * itemsize
        yield Stream("forward", name, loaded=loaded, once=once, sharers=sharers)
    yield Stream("forward", "O", stored=out, once=out)
    yield Stream("forward", "LSE", stored=queries * _FP32, once=queries * _FP32)


def _backward(
    config: BackwardConfig | BackwardConfigSm80, problem: AttnProblem
) -> Iterator[Stream]:
    """K, V, dK and dV once; the row statistics and dQ once for every tile of keys; Q and dO
    likewise, or for every cluster of tiles."""
    p, itemsize, ctas = problem, problem.dtype.itemsize, cluster_of(config)
    tiling, loading = (
        Tiling(p.seqlen_q, p.seqlen_k, config.tile_m, keys)
        for keys in (config.tile_n, config.tile_n * ctas)
    )
    ranges, loaded_ranges = (
        [query_block_range(p.mask, n, tiles) for n in range(tiles.n_blocks)]
        for tiles in (tiling, loading)
    )
    heads = p.batch * p.heads_q
    rows = _rows(ranges, config.tile_m, p.seqlen_q) * heads
    loaded_rows = _rows(loaded_ranges, config.tile_m, p.seqlen_q) * heads
    loaded_blocks = sum(found.visited for found in loaded_ranges)
    padded = sum(found.visited for found in ranges) * config.tile_m * heads
    queries, keys = heads * p.seqlen_q, p.batch * p.heads_k * p.seqlen_k
    for name, dim in (("K", p.head_dim), ("V", p.head_dim_v)):
        size = keys * dim * itemsize
        gradient = size if config.needs(f"d{name.lower()}") else 0
        yield Stream("backward", name, loaded=size, once=size)
        yield Stream("backward", f"d{name}", stored=gradient, once=gradient)
    sharers = loading.n_blocks * ctas
    for name, dim in (("Q", p.head_dim), ("dO", p.head_dim_v)):
        loaded, once = loaded_rows * dim * itemsize, queries * dim * itemsize
        yield Stream("backward", name, loaded=loaded, once=once, sharers=sharers)
    statistics = _STATISTICS * _FP32
    yield Stream(
        "backward",
        "LSE, delta",
        loaded=ctas * loaded_blocks * config.tile_m * heads * statistics,
        once=_padded_rows(config, p) * heads * statistics,
        sharers=sharers,
    )
    if config.needs("dq"):
        order = config.accumulator_order
        added_rows = rows if order is AccumulatorOrder.ROWS else padded
        stored = added_rows * order.columns(p.head_dim) * _FP32
        once = _sums(order, config, p) * _FP32
        yield Stream("backward", "dQ sums", stored=stored, once=once, sharers=sharers)


def _preprocess(config: PreprocessConfig, problem: AttnProblem) -> Iterator[Stream]:
    p, heads = problem, problem.batch * problem.heads_q
    queries = heads * p.seqlen_q
    for name in ("O", "dO"):
        size = queries * p.head_dim_v * p.dtype.itemsize
        yield Stream("before", name, loaded=size, once=size)
    # A row that sees no key has a gradient of 0, whatever its dLSE.
    seeing = heads * p.mask.rows_with_keys(p.seqlen_q, p.seqlen_k)
    size = (queries + seeing) * _FP32
    yield Stream("before", "LSE, dLSE", loaded=size, once=size)
    size = _STATISTICS * _padded_rows(config, p) * heads * _FP32
    yield Stream("before", "LSE, delta", stored=size, once=size)
    if config.zero_dq is not None:
        size = _sums(config.zero_dq, config, p) * _FP32
        yield Stream("before", "dQ sums", stored=size, once=size)


def _postprocess(config: PostprocessConfig, problem: AttnProblem) -> Iterator[Stream]:
    p, heads = problem, problem.batch * problem.heads_q
    gradient = heads * p.seqlen_q * p.head_dim * p.dtype.itemsize
    rows = p.seqlen_q
    if config.order is not AccumulatorOrder.ROWS:
        # Read in pairs of rows, so far apart; the second may be past the end.
        apart = _ROWS_APART[config.order]
        pairs, rest = divmod(p.seqlen_q, 2 * apart)
        rows = 2 * (pairs * apart + min(rest, apart))
    sums = heads * rows * config.order.columns(p.head_dim) * _FP32
    yield Stream("after", "dQ sums", loaded=sums, once=sums)
    yield Stream("after", "dQ", stored=gradient, once=gradient)


def _rows(ranges: Iterable[BlockRange], tile: int, length: int) -> int:
    """Rows of the blocks in all ranges, of which only the last block may be partial."""
    return sum(min(found.end * tile, length) - found.begin * tile for found in ranges)


def _sums(
    order: AccumulatorOrder, config: PreprocessConfig | MainConfig, problem: AttnProblem
) -> int:
    """Values in the accumulator of dQ."""
    p = problem
    rows = p.seqlen_q if order is AccumulatorOrder.ROWS else _padded_rows(config, p)
    return p.batch * p.heads_q * rows * order.columns(p.head_dim)


def _padded_rows(config: PreprocessConfig | MainConfig, problem: AttnProblem) -> int:
    return -(-problem.seqlen_q // config.tile_m) * config.tile_m


def _sum(parts: Iterable[Traffic]) -> Traffic:
    loaded = stored = 0
    for part in parts:
        loaded, stored = loaded + part.loaded, stored + part.stored
    return Traffic(loaded, stored)
