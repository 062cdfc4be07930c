"""Does a configuration fit the machine? Shared memory, registers and instruction shapes."""

from __future__ import annotations

from dataclasses import dataclass

from hopperflash.plan.arch import ArchSpec
from hopperflash.plan.config import WARPGROUP_THREADS, ForwardConfig, POperand
from hopperflash.plan.support import Support
from hopperflash.problem import DType

# TMA with 128-byte swizzle wants 1024-byte aligned tiles.
SMEM_ALIGNMENT = 1024
BARRIER_BYTES = 8
# A full and an empty barrier guard every stage of K, of V, and the one tile of Q.
BARRIERS_PER_STAGE = 2

WGMMA_M = 64
# The K extent of one 16-bit wgmma, so the step of every contracted size.
WGMMA_K = 16
WGMMA_N_MAX = 256
TMA_BOX_MAX = 256

SETMAXNREG_STEP = 8
SETMAXNREG_RANGE = (24, 256)
# Row statistics, addresses, barriers and loop state beside the fragments, per consumer thread.
REGISTER_OVERHEAD = 24


@dataclass(frozen=True)
class SharedMemoryBudget:
    """Bytes of dynamic shared memory per CTA; O leaves through the memory Q came in by."""

    q_and_o: int
    k: int
    v: int
    p: int
    barriers: int

    @property
    def total(self) -> int:
        """Bytes with every region rounded up to its alignment."""
        return sum(_align(size) for size in (self.q_and_o, self.k, self.v, self.p, self.barriers))


@dataclass(frozen=True)
class RegisterBudget:
    """32-bit registers per consumer thread, and per CTA what the roles claim of the pool."""

    acc_S: int
    acc_O: int
    P: int
    overhead: int
    limit: int
    claimed: int
    pool: int

    @property
    def total(self) -> int:
        """Registers a consumer thread needs; `limit` is what it may have."""
        return self.acc_S + self.acc_O + self.P + self.overhead


def shared_memory(config: ForwardConfig, itemsize: int) -> SharedMemoryBudget:
    """Shared memory of a configuration for elements of `itemsize` bytes."""
    stages = config.stages_kv
    rows_kv = stages * config.tile_n
    p_elements = config.tile_m * config.tile_n if config.p_operand is POperand.SHARED else 0
    return SharedMemoryBudget(
        q_and_o=config.tile_m * max(config.head_dim, config.head_dim_v) * itemsize,
        k=rows_kv * config.head_dim * itemsize,
        v=rows_kv * config.head_dim_v * itemsize,
        p=p_elements * itemsize,
        barriers=BARRIERS_PER_STAGE * (2 * stages + 1) * BARRIER_BYTES,
    )


def registers(config: ForwardConfig, arch: ArchSpec) -> RegisterBudget:
    """Registers of a configuration: fp32 accumulators, 16-bit P packed two to a register.

    The pool is what the CTA is launched with: every thread gets the same count, rounded down to
    the allocation step; `setmaxnreg` only moves registers between roles within it.
    """
    rows = config.tile_m // config.consumer_warpgroups
    acc_S = rows * config.tile_n // WARPGROUP_THREADS
    consumers = config.consumer_warpgroups * config.registers_consumer
    at_launch = arch.registers_per_sm // config.threads // SETMAXNREG_STEP * SETMAXNREG_STEP
    return RegisterBudget(
        acc_S=acc_S,
        acc_O=rows * config.head_dim_v // WARPGROUP_THREADS,
        P=acc_S // 2 if config.p_operand is POperand.REGISTERS else 0,
        overhead=REGISTER_OVERHEAD,
        limit=min(config.registers_consumer, arch.max_registers_per_thread),
        claimed=WARPGROUP_THREADS * (config.registers_producer + consumers),
        pool=config.threads * min(at_launch, SETMAXNREG_RANGE[1]),
    )


def check(config: ForwardConfig, arch: ArchSpec, dtype: DType) -> Support:
    """Whether `arch` can run `config`; each reason carries the arithmetic that rules it out."""
    return Support.unless(
        [
            *_shape_reasons(config),
            *_shared_memory_reasons(shared_memory(config, dtype.itemsize), arch),
            *_register_reasons(config, registers(config, arch)),
        ]
    )


def _shape_reasons(config: ForwardConfig) -> list[str]:
    reasons = []
    rows = WGMMA_M * config.consumer_warpgroups
    if config.tile_m % rows:
        reasons.append(
            f"tile_m {config.tile_m} is not a multiple of {rows}: {config.consumer_warpgroups}"
            f" consumer warpgroups of {WGMMA_M} rows (wgmma)"
        )
    contracted = ("tile_n", config.tile_n), ("head_dim", config.head_dim)
    for name, size in (*contracted, ("head_dim_v", config.head_dim_v)):
        if size % WGMMA_K or not 0 < size <= WGMMA_N_MAX:
            reasons.append(
                f"{name} {size} is not a multiple of {WGMMA_K} in {WGMMA_K}..{WGMMA_N_MAX} (wgmma)"
            )
    if config.tile_m > TMA_BOX_MAX:
        reasons.append(f"tile_m {config.tile_m} exceeds the {TMA_BOX_MAX} rows of a TMA box")
    return reasons


def _shared_memory_reasons(budget: SharedMemoryBudget, arch: ArchSpec) -> list[str]:
    if budget.total <= arch.smem_bytes_per_block:
        return []
    return [
        f"shared memory {budget.total} B (Q/O {budget.q_and_o}, K {budget.k}, V {budget.v},"
        f" P {budget.p}, barriers {budget.barriers}) exceeds the {arch.smem_bytes_per_block} B"
        f" per block of {arch.name}"
    ]


def _register_reasons(config: ForwardConfig, budget: RegisterBudget) -> list[str]:
    reasons = []
    low, high = SETMAXNREG_RANGE
    for role, count in (
        ("producer", config.registers_producer),
        ("consumer", config.registers_consumer),
    ):
        if count % SETMAXNREG_STEP or not low <= count <= high:
            reasons.append(
                f"{count} {role} registers are not a multiple of {SETMAXNREG_STEP} in"
                f" {low}..{high} (setmaxnreg)"
            )
    if budget.claimed > budget.pool:
        reasons.append(
            f"the roles claim {budget.claimed} registers, {WARPGROUP_THREADS} *"
            f" ({config.registers_producer} + {config.consumer_warpgroups} *"
            f" {config.registers_consumer}), of {budget.pool} that {config.threads} threads"
            " are launched with"
        )
    if budget.total > budget.limit:
        reasons.append(
            f"a consumer thread needs {budget.total} registers (acc_S {budget.acc_S},"
            f" acc_O {budget.acc_O}, P {budget.P}, overhead {budget.overhead}) and has"
            f" {budget.limit}"
        )
    return reasons


def _align(size: int) -> int:
    return -(-size // SMEM_ALIGNMENT) * SMEM_ALIGNMENT
