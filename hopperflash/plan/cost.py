"""A model of what a Hopper tile costs: the clocks of each unit for one step of a kernel's loop.

A step is a key block of a forward tile or a query block of a backward tile. What it multiplies,
moves and computes follows from the configuration; addresses, barriers and loop control are a
constant. `docs/performance.md` has the assumptions, and the predictions beside what was measured.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from hopperflash.plan.config import (
    WARPGROUP_THREADS,
    WGMMA_ROWS,
    BackwardConfig,
    BackwardConfigSm80,
    ForwardConfig,
    ForwardConfigSm80,
    MainConfig,
    POperand,
    cluster_of,
)
from hopperflash.plan.units import (
    ALU_CLOCKS,
    HOPPER,
    MUFU_CLOCKS,
    SHARED_BYTES,
    SUB_CORES,
    UnitClocks,
)

WGMMA_DEPTH = 16
_A_BYTES = WGMMA_ROWS * WGMMA_DEPTH * 2
_B_BYTES = WGMMA_DEPTH * 2  # a column
_FP32 = 4
_ROWS = 2  # of a fragment that a thread has a part of
_VECTOR = 16  # bytes that a thread adds at a time
_MATRICES = 8  # 16-bit values that a thread hands to one stmatrix

# Descriptors, addresses, barriers and loop control, per thread and step: about the median of what
# the compiler adds to the arithmetic below in this package's kernels.
FORWARD_OVERHEAD = 90
BACKWARD_OVERHEAD = 175
SHARED_P_OVERHEAD = 40
# What a backward multiplies, by what the rows of S are.
_ROWS_ARE_KEYS = ("S^T = K Q^T", "dP^T = V dO^T", "dV += P^T dO", "dK += dS^T Q")
_ROWS_ARE_QUERIES = ("S = Q K^T", "dP = dO V^T", "dV^T += dO^T P", "dK^T += Q^T dS")
# An exponential without the MUFU: three additions and a polynomial of degree 5; bounds and bits.
EXP2_FMA = 8
EXP2_ALU = 2


@dataclass(frozen=True)
class Gemm:
    """A product (rows, columns, depth) whose columns warpgroups split into `shares`.

    wgmma m64nNk16 reads 32 N bytes of B from shared memory, and 2048 of A unless A is in registers;
    every warpgroup reads for itself.
    """

    name: str
    rows: int
    columns: int
    depth: int
    a_in_registers: bool = False
    shares: int = 1

    @property
    def instructions(self) -> int:
        """wgmma of all warpgroups."""
        return self.rows // WGMMA_ROWS * self.shares * (self.depth // WGMMA_DEPTH)

    @property
    def tensor_clocks(self) -> int:
        """Clocks of the tensor cores."""
        return self.instructions * (self.columns // self.shares) // 2

    @property
    def bytes_read(self) -> int:
        """Bytes of both operands from shared memory."""
        a = 0 if self.a_in_registers else _A_BYTES
        return self.instructions * (a + _B_BYTES * (self.columns // self.shares))


@dataclass(frozen=True)
class ThreadWork:
    """Instructions of a thread in one step, by pipe, beside wgmma."""

    mufu: float = 0
    fma: float = 0
    alu: float = 0
    lsu: float = 0
    overhead: float = 0

    @property
    def total(self) -> float:
        """All of them."""
        return self.mufu + self.fma + self.alu + self.lsu + self.overhead


class Moved(NamedTuple):
    """Bytes of a step that no thread moves through shared memory: by TMA or cp.async. Those to and
    from L2, whoever moves them."""

    into_shared: int
    out_of_shared: int
    l2: int


@dataclass(frozen=True)
class TileStep:
    """One step: its GEMMs, the bytes that others move, and what the threads compute."""

    scores: int
    """Of the tile, hidden ones too."""
    warpgroups: int
    gemms: tuple[Gemm, ...]
    shared: tuple[tuple[str, int], ...]
    """Bytes through shared memory beside the GEMMs' operands."""
    l2_bytes: int
    """Bytes to and from L2."""
    thread: ThreadWork = field(default_factory=ThreadWork)

    @property
    def shared_bytes(self) -> int:
        """Bytes read from and written to shared memory."""
        return sum(g.bytes_read for g in self.gemms) + sum(size for _, size in self.shared)

    @property
    def instructions(self) -> float:
        """Instructions per thread, wgmma too."""
        return self.thread.total + sum(g.instructions for g in self.gemms) / self.warpgroups

    @property
    def instructions_per_score(self) -> float:
        """Instructions per thread over its scores."""
        return self.instructions * self.warpgroups * WARPGROUP_THREADS / self.scores

    @property
    def units(self) -> UnitClocks:
        """Clocks of each unit; each sub-core has one warp of every warpgroup."""
        thread, warps = self.thread, self.warpgroups
        return UnitClocks(
            tensor=sum(gemm.tensor_clocks for gemm in self.gemms),
            mufu=thread.mufu * MUFU_CLOCKS * warps,
            issue=self.instructions * warps,
            fma=thread.fma * HOPPER.fma_clocks * warps,
            alu=thread.alu * ALU_CLOCKS * warps,
            shared=self.shared_bytes / SHARED_BYTES,
            l2=self.l2_bytes / HOPPER.l2_bytes,
        )


def tile_step(config: ForwardConfig | BackwardConfig, itemsize: int) -> TileStep:
    """A step without a mask or a cap."""
    if isinstance(config, ForwardConfig):
        return _forward(config, itemsize)
    return _backward(config, itemsize)


def with_cheapest_factors(config: ForwardConfig, itemsize: int) -> ForwardConfig:
    """The configuration with the factors that rescale O on the FMA pipe, if the MUFU would bind."""
    on_fma = replace(config, factors_on_fma=True)
    before, after = (tile_step(c, itemsize).units.bound.clocks for c in (config, on_fma))
    return on_fma if after < before else config


def moved_bytes(config: MainConfig, itemsize: int) -> Moved:
    """K and V of a forward step; Q and dO of a backward step, and its dQ in fp32."""
    c = config
    if isinstance(c, (ForwardConfig, ForwardConfigSm80)):
        fills = c.tile_n * (c.head_dim + c.head_dim_v) * itemsize
        return Moved(fills, 0, fills // cluster_of(c))
    fills = c.tile_m * (c.head_dim + c.head_dim_v) * itemsize
    return Moved(fills, 0, fills // cluster_of(c) + _sums(c))


def _sums(config: BackwardConfig | BackwardConfigSm80) -> int:
    """Bytes of dQ, which threads add from their registers."""
    return config.tile_m * config.head_dim * _FP32 if config.needs("dq") else 0


def _forward(config: ForwardConfig, itemsize: int) -> TileStep:
    c, moved = config, moved_bytes(config, itemsize)
    shared_P = c.p_operand is POperand.SHARED
    threads = WARPGROUP_THREADS * c.consumer_warpgroups
    scores, outputs = c.tile_m * c.tile_n // threads, c.tile_m * c.head_dim_v // threads
    shuffles = 2 * _ROWS
    return TileStep(
        scores=c.tile_m * c.tile_n,
        warpgroups=c.consumer_warpgroups,
        gemms=(
            Gemm("S = Q K^T", c.tile_m, c.tile_n, c.head_dim),
            Gemm("O += P V", c.tile_m, c.head_dim_v, c.tile_n, a_in_registers=not shared_P),
        ),
        shared=(
            ("K and V from TMA", moved.into_shared),
            ("P stored", c.tile_m * c.tile_n * itemsize if shared_P else 0),
            ("row maxima shuffled", _wavefronts(shuffles, c.consumer_warpgroups)),
        ),
        l2_bytes=moved.l2,
        thread=ThreadWork(
            mufu=scores + _ROWS * (not c.factors_on_fma),
            # scale and shift, row sum, rescaling of O
            fma=2 * scores + outputs + _ROWS * EXP2_FMA * c.factors_on_fma,
            # row maximum, P packed in pairs
            alu=1.5 * scores + _ROWS * EXP2_ALU * c.factors_on_fma,
            lsu=shuffles + (scores / _MATRICES if shared_P else 0),
            overhead=FORWARD_OVERHEAD + SHARED_P_OVERHEAD * shared_P,
        ),
    )


def _backward(config: BackwardConfig, itemsize: int) -> TileStep:
    """Where P^T and dS^T are operands from registers only dS crosses shared memory, for dQ."""
    c, moved = config, moved_bytes(config, itemsize)
    m, n = c.tile_m, c.tile_n
    in_registers = c.p_operand is POperand.REGISTERS
    P_crosses = c.needs("dv") and not in_registers
    dS_crosses = c.needs("dq") or (c.needs("dk") and not in_registers)
    dQ = _sums(c)
    threads = WARPGROUP_THREADS * c.consumer_warpgroups
    scores = m * n // threads
    # LSE and delta of a thread's rows, or of its columns, in pairs
    statistics = 2 * _ROWS * m // WGMMA_ROWS if c.query_rows else m // c.key_shares // 4
    stores = (scores / _MATRICES) * (dS_crosses + P_crosses)
    return TileStep(
        scores=m * n,
        warpgroups=c.consumer_warpgroups,
        gemms=_backward_gemms(c),
        shared=(
            ("Q and dO from TMA", moved.into_shared),
            ("dS stored", m * n * itemsize if dS_crosses else 0),
            ("P stored", m * n * itemsize if P_crosses else 0),
            ("dQ added from registers", dQ),
            ("LSE and delta read", _wavefronts(statistics, c.consumer_warpgroups)),
        ),
        l2_bytes=moved.l2,
        thread=ThreadWork(
            mufu=scores,
            # scale and shift, dP - delta, P (dP - delta)
            fma=3 * scores,
            # P and dS packed in pairs
            alu=scores,
            lsu=statistics + stores + dQ / _VECTOR / threads,
            overhead=BACKWARD_OVERHEAD + SHARED_P_OVERHEAD * (not in_registers),
        ),
    )


def _backward_gemms(config: BackwardConfig) -> tuple[Gemm, ...]:
    c = config
    m, n, d, dv = c.tile_m, c.tile_n, c.head_dim, c.head_dim_v
    in_registers, shares = c.p_operand is POperand.REGISTERS, c.column_shares
    S, dP, dV, dK = _ROWS_ARE_QUERIES if c.query_rows else _ROWS_ARE_KEYS
    gemms = [Gemm(S, *c.oriented(n, m), d, shares=shares)]
    gemms += [Gemm(dP, *c.oriented(n, m), dv, shares=shares)]
    if c.needs("dv"):
        gemms += [Gemm(dV, *c.oriented(n, dv), m, in_registers, shares)]
    if c.needs("dk"):
        gemms += [Gemm(dK, *c.oriented(n, d), m, in_registers, shares)]
    if c.needs("dq") and c.dq_swap_ab:
        gemms += [Gemm("dQ^T = K^T dS^T", d, m, n)]
    elif c.needs("dq"):
        gemms += [Gemm("dQ = dS K", m, d, n, shares=c.query_shares)]
    return tuple(gemms)


def _wavefronts(instructions: int, warpgroups: int) -> int:
    """Bytes' worth of the shared-memory pipe that shuffles and loads of few addresses take."""
    return instructions * SUB_CORES * warpgroups * SHARED_BYTES
