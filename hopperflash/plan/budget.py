"""What a Hopper configuration takes of the machine: shared memory by region, registers by phase.

The records serve `budget_sm80` too.
"""

from __future__ import annotations

from dataclasses import dataclass

from hopperflash.plan.arch import ArchSpec
from hopperflash.plan.config import WARPGROUP_THREADS, BackwardConfig, ForwardConfig, POperand

# The kernels that have a budget: the others are bound by memory and use neither to speak of.
ConfigSm90 = ForwardConfig | BackwardConfig

# TMA with 128-byte swizzle wants 1024-byte aligned tiles, and so a block's memory as a whole.
TILE_ALIGNMENT = 1024
STATISTIC_ALIGNMENT = 128
BARRIER_BYTES = 8
# A full and an empty barrier guard every stage of a ring.
BARRIERS_PER_STAGE = 2
FP32_BYTES = 4

SETMAXNREG_STEP = 8
SETMAXNREG_MAX = 256
# Row statistics, addresses, barriers and loop state beside the fragments, per thread.
REGISTER_OVERHEAD = 24


@dataclass(frozen=True)
class Region:
    """A part of a CTA's shared memory, in bytes."""

    name: str
    size: int
    alignment: int = TILE_ALIGNMENT


@dataclass(frozen=True)
class SharedMemoryBudget:
    """Dynamic shared memory per CTA: its regions in the order of the kernel's struct."""

    regions: tuple[Region, ...]
    alignment: int = TILE_ALIGNMENT

    @property
    def total(self) -> int:
        """Bytes with every region at its alignment, and the whole rounded up to `alignment`."""
        end = 0
        for region in self.regions:
            end = _round_up(end, region.alignment) + region.size
        return _round_up(end, self.alignment)

    def __getitem__(self, name: str) -> int:
        """Bytes of the region called `name`, without padding."""
        return {region.name: region.size for region in self.regions}[name]

    def __str__(self) -> str:
        return " + ".join(f"{region.name} {region.size}" for region in self.regions)


@dataclass(frozen=True)
class RegisterPhase:
    """What a thread that computes holds at one time, beside `REGISTER_OVERHEAD`."""

    name: str
    fragments: tuple[tuple[str, int], ...]

    @property
    def total(self) -> int:
        """Registers of all fragments."""
        return sum(count for _, count in self.fragments)

    def __getitem__(self, name: str) -> int:
        """Registers of the fragment called `name`."""
        return dict(self.fragments)[name]

    def __str__(self) -> str:
        return " + ".join(f"{name} {count}" for name, count in self.fragments)


@dataclass(frozen=True)
class RegisterBudget:
    """32-bit registers of a thread that computes."""

    phases: tuple[RegisterPhase, ...]
    overhead: int
    limit: int

    @property
    def peak(self) -> RegisterPhase:
        """The phase that decides."""
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def total(self) -> int:
        """Registers the thread needs; `limit` is what it may have."""
        return self.peak.total + self.overhead


@dataclass(frozen=True)
class RoleRegisterBudget(RegisterBudget):
    """Registers of a consumer thread, and per CTA what the roles claim of the pool."""

    claimed: int
    pool: int


def shared_memory(config: ConfigSm90, itemsize: int) -> SharedMemoryBudget:
    """Shared memory of a configuration for operands of `itemsize` bytes."""
    if isinstance(config, ForwardConfig):
        return SharedMemoryBudget(_forward_regions(config, itemsize))
    return SharedMemoryBudget(_backward_regions(config, itemsize))


def registers(config: ConfigSm90, arch: ArchSpec) -> RoleRegisterBudget:
    """Registers of a configuration.

    The pool is what the CTA is launched with: every thread gets the same count, rounded down to
    the allocation step; `setmaxnreg` only moves registers between roles within it.
    """
    if isinstance(config, ForwardConfig):
        phases = _forward_phases(config)
    else:
        phases = _backward_phases(config)
    consumers = config.consumer_warpgroups * config.registers_consumer
    at_launch = arch.registers_per_sm // config.threads // SETMAXNREG_STEP * SETMAXNREG_STEP
    return RoleRegisterBudget(
        phases=phases,
        overhead=REGISTER_OVERHEAD,
        limit=min(config.registers_consumer, arch.max_registers_per_thread),
        claimed=WARPGROUP_THREADS * (config.registers_producer + consumers),
        pool=config.threads * min(at_launch, SETMAXNREG_MAX),
    )


def _forward_regions(config: ForwardConfig, itemsize: int) -> tuple[Region, ...]:
    """Rings of Q (one tile), K and V; O leaves through the memory Q came in by."""
    c = config
    rows_kv = c.stages_kv * c.tile_n
    p_elements = c.tile_m * c.tile_n if c.p_operand is POperand.SHARED else 0
    return (
        Region("barriers", _barriers(1, c.stages_kv, c.stages_kv), BARRIER_BYTES),
        Region("Q/O", c.tile_m * max(c.head_dim, c.head_dim_v) * itemsize),
        Region("K", rows_kv * c.head_dim * itemsize),
        Region("V", rows_kv * c.head_dim_v * itemsize),
        Region("P", p_elements * itemsize),
    )


def _backward_regions(config: BackwardConfig, itemsize: int) -> tuple[Region, ...]:
    """Rings of K with V (one tile), and of Q, dO, LSE and delta.

    dK and dV leave through the memory K and V came in by, dQ from registers.
    """
    c = config
    p_elements = c.tile_m * c.tile_n if c.p_operand is POperand.SHARED else 0
    rows = c.stages * c.tile_m
    return (
        Region("barriers", _barriers(1, c.stages), BARRIER_BYTES),
        Region("LSE", rows * FP32_BYTES, STATISTIC_ALIGNMENT),
        Region("delta", rows * FP32_BYTES, STATISTIC_ALIGNMENT),
        Region("K/dK", c.tile_n * c.head_dim * itemsize),
        Region("V/dV", c.tile_n * c.head_dim_v * itemsize),
        Region("Q", rows * c.head_dim * itemsize),
        Region("dO", rows * c.head_dim_v * itemsize),
        Region("P", p_elements * itemsize),
        Region("dS", c.tile_m * c.tile_n * itemsize),
    )


def _forward_phases(config: ForwardConfig) -> tuple[RegisterPhase, ...]:
    """fp32 accumulators, and 16-bit P packed two to a register where it stays in registers."""
    c = config
    acc_S = _accumulator(c.tile_m, c.tile_n, c)
    P = acc_S // 2 if c.p_operand is POperand.REGISTERS else 0
    acc_O = _accumulator(c.tile_m, c.head_dim_v, c)
    return (RegisterPhase("softmax", (("acc_S", acc_S), ("acc_O", acc_O), ("P", P))),)


def _backward_phases(config: BackwardConfig) -> tuple[RegisterPhase, ...]:
    """dV and dK stay throughout; S and dP make room for P, dS and dQ.

    Where all warpgroups compute dQ, P is not yet dead. Of parts of its transpose the second waits
    for dK, so that dS is dead; ptxas never lets the third take the place of the first.
    """
    c = config
    kept = (
        ("acc_dV", _accumulator(c.tile_n, c.head_dim_v, c)),
        ("acc_dK", _accumulator(c.tile_n, c.head_dim, c)),
    )
    acc_S = _accumulator(c.tile_n, c.tile_m, c)
    rows, columns = c.dq_tile
    acc_dQ = rows * columns // (WARPGROUP_THREADS * (1 if c.dq_swap_ab else c.dq_warpgroups))
    dS = acc_S // 2 if c.p_operand is POperand.REGISTERS else 0
    P = dS if c.dq_alike else 0
    phases = (
        RegisterPhase("softmax", (*kept, ("acc_S", acc_S), ("acc_dP", acc_S))),
        RegisterPhase("GEMM", (*kept, ("acc_dQ", acc_dQ), ("P", P), ("dS", dS))),
    )
    if not c.dq_swap_ab:
        return phases
    return (*phases, RegisterPhase("dQ", (*kept, ("acc_dQ", len(c.dq_parts(0)) * acc_dQ))))


def _accumulator(rows: int, columns: int, config: ConfigSm90) -> int:
    """fp32 registers per thread of a tile that all consumer warpgroups share."""
    return rows * columns // (WARPGROUP_THREADS * config.consumer_warpgroups)


def _barriers(*stages: int) -> int:
    """Bytes of the barriers of rings with that many stages."""
    return BARRIERS_PER_STAGE * sum(stages) * BARRIER_BYTES


def _round_up(size: int, step: int) -> int:
    return -(-size // step) * step
