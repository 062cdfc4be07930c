"""Everything about a kernel that is fixed before it is traced."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

SideT = TypeVar("SideT")

WARPGROUP_THREADS = 128
WGMMA_ROWS = 64  # rows of an instruction, so of a warpgroup
MMA_ROWS = 16  # of an mma.sync, so of a warp
WARP_THREADS = 32

# What the table of tiles says of each: its block of a sequence, or -1 where the table has more rows
# than there are tiles; which sequence; its rows of Q and of K, and how many of them count.
TILE_FIELDS = (
    "block", "sequence", "first_q", "rows_q", "seqlen_q", "first_k", "rows_k", "seqlen_k",
)  # fmt: skip


class POperand(Enum):
    """Where the second GEMM, O += P V, reads its probabilities from."""

    REGISTERS = "registers"
    SHARED = "shared"


class Scheduler(Enum):
    """How many tiles a CTA computes."""

    SINGLE = "single-tile"
    PERSISTENT = "persistent"  # no more CTAs than may run at once: each strides over the tiles
    DYNAMIC = "dynamic"  # no more CTAs likewise: each takes the next tile when it is done with one


class AccumulatorOrder(Enum):
    """How dQ lies in memory while key tiles add to it in fp32."""

    ROWS = "rows"  # (batch, seqlen_q, heads_q, head_dim)
    FRAGMENTS = "fragments"  # tiles of queries, each in the order of `kernels.common.fragments`
    TRANSPOSED = "transposed"  # the same of dQ^T

    def columns(self, head_dim: int) -> int:
        """Columns of dQ that have a place: of the transpose whole fragments."""
        step = MMA_ROWS if self is AccumulatorOrder.TRANSPOSED else 1
        return -(-head_dim // step) * step


@dataclass(frozen=True)
class ForwardConfig:
    """A warp-specialised forward kernel: one producer warpgroup loads, the others compute.

    `tile_m` query rows per CTA, `tile_n` keys per step; head dims are padded to what the tile
    holds; `stages_kv` buffers for K and as many for V; registers are per thread of each role. With
    `ping_pong` the consumer warpgroups issue their GEMMs in turns. `group` query heads that share a
    key head may be folded into the rows: row r of a tile is then head r % group of query r //
    group, and rows past the last whole query are idle. `cluster_m` CTAs with neighbouring tiles of
    a head load each block of K and V once for all of them. The factors that rescale O are
    exponentials, which the MUFU need not compute.
    """

    tile_m: int
    tile_n: int
    head_dim: int
    head_dim_v: int
    consumer_warpgroups: int
    registers_producer: int
    registers_consumer: int
    p_operand: POperand
    stages_kv: int = 2
    ping_pong: bool = False
    group: int = 1
    cluster_m: int = 1
    factors_on_fma: bool = False
    scheduler: Scheduler = Scheduler.SINGLE

    @property
    def queries(self) -> int:
        """Queries per tile."""
        return self.tile_m // self.group

    @property
    def variant(self) -> tuple[str, ...]:
        """What sets a kernel apart beside its tile."""
        group = (f"group{self.group}",) if self.group > 1 else ()
        cluster = (f"cluster{self.cluster_m}",) if self.cluster_m > 1 else ()
        return (*group, *cluster, *_scheduler_name(self.scheduler))

    @property
    def threads(self) -> int:
        """Threads per CTA."""
        return WARPGROUP_THREADS * (self.consumer_warpgroups + 1)


@dataclass(frozen=True)
class BackwardConfig:
    """A warp-specialised backward kernel: a CTA keeps `tile_n` keys and streams query tiles.

    S^T, dP^T, dV and dK have keys as their rows. `key_warpgroups` of the `consumer_warpgroups` are
    stacked along those rows and the others split the columns; only where all are stacked can P^T
    and dS^T be operands from registers. With `query_rows` it is S and dP that have queries as
    rows, and dV^T and dK^T that have head dims: keys are columns, which the warpgroups split, so
    that a tile need not have 64 of them each. dQ is the work of the first `dq_warpgroups`; with
    `dq_swap_ab` it is dQ^T = K^T dS^T, of which they take 64 rows (head dims) in turns. Q and dO
    have `stages`; registers are per thread of each role. Where Q and K do not have all columns of
    the padded head_dim (`exact_head_dim`), dQ's last are not added. `cluster_n` CTAs with
    neighbouring tiles of a head load each block of Q and dO once for all of them.
    """

    tile_m: int
    tile_n: int
    head_dim: int
    head_dim_v: int
    consumer_warpgroups: int
    key_warpgroups: int
    dq_warpgroups: int
    registers_producer: int
    registers_consumer: int
    stages: int = 2
    dq_swap_ab: bool = False
    query_rows: bool = False
    deterministic: bool = False
    gradients: tuple[str, ...] = ("dq", "dk", "dv")
    scheduler: Scheduler = Scheduler.SINGLE
    exact_head_dim: bool = True
    cluster_n: int = 1

    def needs(self, gradient: str) -> bool:
        """Whether the kernel computes "dq", "dk" or "dv"."""
        return gradient in self.gradients

    @property
    def variant(self) -> tuple[str, ...]:
        """What sets a kernel apart beside its tile."""
        order = ("deterministic",) if self.deterministic else ()
        columns = () if self.exact_head_dim else ("narrower",)
        cluster = (f"cluster{self.cluster_n}",) if self.cluster_n > 1 else ()
        return (*order, *columns, *cluster, *_scheduler_name(self.scheduler))

    @property
    def threads(self) -> int:
        """Threads per CTA."""
        return WARPGROUP_THREADS * (self.consumer_warpgroups + 1)

    @property
    def accumulator_order(self) -> AccumulatorOrder:
        """A thread adds four neighbouring values by one instruction."""
        return AccumulatorOrder.TRANSPOSED if self.dq_swap_ab else AccumulatorOrder.FRAGMENTS

    @property
    def p_operand(self) -> POperand:
        """Where dV += P^T dO and dK += dS^T Q read P and dS from."""
        stacked = self.key_warpgroups == self.consumer_warpgroups and not self.query_rows
        return POperand.REGISTERS if stacked else POperand.SHARED

    @property
    def keeps_P(self) -> bool:
        """Whether a warpgroup alone reads its P: then dV^T += dO^T P begins before dS is there."""
        return self.query_rows and self.needs("dv")

    def oriented(self, keys: SideT, others: SideT) -> tuple[SideT, SideT]:
        """The two sides of S, dP, dV or dK, that of the keys and the other one, in the order of
        rows and columns, and so of the operands A and B."""
        return (others, keys) if self.query_rows else (keys, others)

    @property
    def key_shares(self) -> int:
        """Into how many parts warpgroups split what is not keys of S, dP, dV and dK."""
        return self.consumer_warpgroups // self.key_warpgroups

    @property
    def row_warpgroups(self) -> int:
        """How many warpgroups are stacked along the rows of S, dP, dV and dK."""
        return self.oriented(self.key_warpgroups, self.key_shares)[0]

    @property
    def column_shares(self) -> int:
        """Into how many parts warpgroups split the columns of S, dP, dV and dK."""
        return self.oriented(self.key_warpgroups, self.key_shares)[1]

    @property
    def query_shares(self) -> int:
        """Into how many parts warpgroups split the columns of dQ, once stacked along its rows."""
        if self.dq_swap_ab:
            return 1
        return max(1, self.dq_warpgroups * WGMMA_ROWS // self.tile_m)

    @property
    def dq_tile(self) -> tuple[int, int]:
        """(rows, columns) of dQ, or of a part of dQ^T."""
        return (WGMMA_ROWS, self.tile_m) if self.dq_swap_ab else (self.tile_m, self.head_dim)

    def dq_parts(self, warpgroup: int) -> tuple[int, ...]:
        """Which parts of dQ^T a consumer warpgroup computes; all of dQ is part 0."""
        if warpgroup >= self.dq_warpgroups or not self.needs("dq"):
            return ()
        if not self.dq_swap_ab:
            return (0,)
        return tuple(range(warpgroup, self.head_dim // WGMMA_ROWS, self.dq_warpgroups))

    @property
    def dq_alike(self) -> bool:
        """Whether all consumer warpgroups do the same."""
        all_compute = self.dq_warpgroups == self.consumer_warpgroups and not self.dq_swap_ab
        return all_compute or not self.needs("dq")


@dataclass(frozen=True)
class PreprocessConfig:
    """The kernel before a backward: `tile_m` rows per CTA, eight lanes a row; zeroes the dQ
    accumulator of some order, where there is one."""

    tile_m: int
    zero_dq: AccumulatorOrder | None
    threads: int = WARPGROUP_THREADS


@dataclass(frozen=True)
class TileTableConfig:
    """The kernel that lists the tiles of packed sequences, longest sequences first.

    Tables of blocks of `tile_m` queries, of `tile_n` keys, or both; blocks of a sequence come in
    ascending or descending order. `seqused` says which of (Q, K) has lengths beside offsets.
    """

    tile_m: int | None = None
    tile_n: int | None = None
    descending_q: bool = False
    descending_k: bool = False
    seqused: tuple[bool, bool] = (False, False)
    threads: int = 256


@dataclass(frozen=True)
class PostprocessConfig:
    """The kernel that turns the dQ accumulator into a gradient: `tile_m` rows per CTA, eight lanes
    for two of them."""

    tile_m: int
    order: AccumulatorOrder
    threads: int = WARPGROUP_THREADS


@dataclass(frozen=True)
class ForwardConfigSm80:
    """An Ampere forward kernel: all warps load and compute, stacked along the query rows.

    K and V have `stages_kv` (2 or more) cp.async stages; `q_in_registers` keeps Q's fragments in
    registers over all keys. `group` is as in `ForwardConfig`.
    """

    tile_m: int
    tile_n: int
    head_dim: int
    head_dim_v: int
    warps: int
    stages_kv: int = 2
    q_in_registers: bool = False
    group: int = 1
    scheduler: Scheduler = Scheduler.SINGLE

    @property
    def queries(self) -> int:
        """Queries per tile."""
        return self.tile_m // self.group

    @property
    def variant(self) -> tuple[str, ...]:
        """What sets a kernel apart beside its tile."""
        group = (f"group{self.group}",) if self.group > 1 else ()
        return (*group, *_scheduler_name(self.scheduler))

    @property
    def threads(self) -> int:
        """Threads per CTA."""
        return WARP_THREADS * self.warps


@dataclass(frozen=True)
class BackwardConfigSm80:
    """An Ampere backward kernel: a CTA keeps `tile_n` keys and streams query tiles.

    S^T, dP^T, dV and dK have keys as their rows. `key_warps` of the `warps` are stacked along those
    rows and the others split the columns; only where all are stacked can P^T and dS^T be operands
    from registers. Q and dO have `stages` (2 or more) cp.async stages.
    """

    tile_m: int
    tile_n: int
    head_dim: int
    head_dim_v: int
    warps: int
    key_warps: int
    stages: int = 2
    deterministic: bool = False
    gradients: tuple[str, ...] = ("dq", "dk", "dv")
    scheduler: Scheduler = Scheduler.SINGLE

    @property
    def threads(self) -> int:
        """Threads per CTA."""
        return WARP_THREADS * self.warps

    @property
    def p_operand(self) -> POperand:
        """Where dV += P^T dO and dK += dS^T Q read their first operand from."""
        return POperand.REGISTERS if self.key_warps == self.warps else POperand.SHARED

    @property
    def key_shares(self) -> int:
        """Into how many parts warps split the columns of S^T, dV and dK."""
        return self.warps // self.key_warps

    @property
    def score_columns(self) -> int:
        """Columns of S^T that a warp multiplies at a time: 16, or 8 where it has no more."""
        return min(MMA_ROWS, self.tile_m // self.key_shares)

    @property
    def query_warps(self) -> int:
        """Warps along the rows of dQ; the others split its columns."""
        return min(self.warps, self.tile_m // MMA_ROWS)

    @property
    def accumulator_order(self) -> AccumulatorOrder:
        """A thread adds its values one by one."""
        return AccumulatorOrder.ROWS

    def needs(self, gradient: str) -> bool:
        """Whether the kernel computes "dq", "dk" or "dv"."""
        return gradient in self.gradients

    @property
    def variant(self) -> tuple[str, ...]:
        """What sets a kernel apart beside its tile."""
        order = ("deterministic",) if self.deterministic else ()
        return (*order, *_scheduler_name(self.scheduler))


def _scheduler_name(scheduler: Scheduler) -> tuple[str, ...]:
    return () if scheduler is Scheduler.SINGLE else (scheduler.value,)


MainConfig = ForwardConfig | BackwardConfig | ForwardConfigSm80 | BackwardConfigSm80
Config = MainConfig | PreprocessConfig | PostprocessConfig | TileTableConfig


def cluster_of(config: MainConfig) -> int:
    """CTAs of a cluster."""
    if isinstance(config, ForwardConfig):
        return config.cluster_m
    return config.cluster_n if isinstance(config, BackwardConfig) else 1
