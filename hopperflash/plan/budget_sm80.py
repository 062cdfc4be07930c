"""What an Ampere configuration takes: shared memory by region, registers by phase."""

from __future__ import annotations

from hopperflash.plan.arch import ArchSpec
from hopperflash.plan.budget import (
    FP32_BYTES,
    REGISTER_OVERHEAD,
    Region,
    RegisterBudget,
    RegisterPhase,
    SharedMemoryBudget,
)
from hopperflash.plan.config import (
    MMA_ROWS,
    BackwardConfigSm80,
    ForwardConfigSm80,
    POperand,
)

ConfigSm80 = ForwardConfigSm80 | BackwardConfigSm80

# Of every region: a row of swizzled banks.
ALIGNMENT = 128
# A thread's registers of one k-step of mma.sync m16n8k16: A for 16 rows, B for 8 columns.
FRAGMENT_A = 4
FRAGMENT_B = 2
FRAGMENT_B_COLUMNS = 8
REGISTER_STEP = 8


def shared_memory(config: ConfigSm80, itemsize: int) -> SharedMemoryBudget:
    """Shared memory of a configuration for operands of `itemsize` bytes."""
    if isinstance(config, ForwardConfigSm80):
        regions = _forward_regions(config, itemsize)
    else:
        regions = _backward_regions(config, itemsize)
    return SharedMemoryBudget(
        tuple(Region(name, size, ALIGNMENT) for name, size in regions), ALIGNMENT
    )


def registers(config: ConfigSm80, arch: ArchSpec) -> RegisterBudget:
    """Registers of a configuration: accumulators, and operands of one k-step.

    The compiler decides how many k-steps are on their way at a time, so it may well use all it has.
    """
    if isinstance(config, ForwardConfigSm80):
        phases = _forward_phases(config)
    else:
        phases = _backward_phases(config)
    each = arch.registers_per_sm // config.threads // REGISTER_STEP * REGISTER_STEP
    return RegisterBudget(phases, REGISTER_OVERHEAD, min(each, arch.max_registers_per_thread))


def _forward_regions(config: ForwardConfigSm80, itemsize: int) -> tuple[tuple[str, int], ...]:
    """Q, whose memory O leaves through, and the stages of K and V."""
    c = config
    rows_kv = c.stages_kv * c.tile_n
    return (
        ("Q/O", c.tile_m * max(c.head_dim, c.head_dim_v) * itemsize),
        ("K", rows_kv * c.head_dim * itemsize),
        ("V", rows_kv * c.head_dim_v * itemsize),
    )


def _backward_regions(config: BackwardConfigSm80, itemsize: int) -> tuple[tuple[str, int], ...]:
    """K and V, whose memory dK and dV leave through, stages of Q and dO, and one score tile."""
    c = config
    rows_q = c.stages * c.tile_m
    return (
        ("K/dK", c.tile_n * c.head_dim * itemsize),
        ("V/dV", c.tile_n * c.head_dim_v * itemsize),
        ("Q", rows_q * c.head_dim * itemsize),
        ("dO", rows_q * c.head_dim_v * itemsize),
        ("P/dS", c.tile_n * c.tile_m * itemsize),
        ("LSE", rows_q * FP32_BYTES),
        ("delta", rows_q * FP32_BYTES),
    )


def _forward_phases(config: ForwardConfigSm80) -> tuple[RegisterPhase, ...]:
    """fp32 accumulators, 16-bit P packed two to a register, Q for all keys where it stays."""
    c = config
    rows = c.tile_m // (MMA_ROWS * c.warps)
    acc_S = c.tile_m * c.tile_n // c.threads
    acc_O = ("acc_O", c.tile_m * c.head_dim_v // c.threads)
    k_steps = c.head_dim // MMA_ROWS if c.q_in_registers else 1
    Q = ("Q", rows * FRAGMENT_A * k_steps)
    kept = (acc_O, Q) if c.q_in_registers else (acc_O,)
    streamed = () if c.q_in_registers else (Q,)
    return (
        RegisterPhase("Q K^T", (*kept, ("acc_S", acc_S), *streamed, ("K", _fragment_B(c.tile_n)))),
        RegisterPhase("P V", (*kept, ("P", acc_S // 2), ("V", _fragment_B(c.head_dim_v)))),
    )


def _backward_phases(config: BackwardConfigSm80) -> tuple[RegisterPhase, ...]:
    """dV and dK stay throughout; S and dP, then P and dS, make room for dQ."""
    c = config
    kept = (
        ("acc_dV", c.tile_n * c.head_dim_v // c.threads),
        ("acc_dK", c.tile_n * c.head_dim // c.threads),
    )
    acc_S = c.tile_n * c.tile_m // c.threads
    rows = c.tile_n // (MMA_ROWS * c.key_warps)
    A = ("A", rows * FRAGMENT_A)
    wider = max(c.head_dim, c.head_dim_v)
    in_registers = c.p_operand is POperand.REGISTERS
    P = ("P", acc_S // 2) if in_registers else A
    rows_dQ = c.tile_m // (MMA_ROWS * c.query_warps)
    columns_dQ = c.head_dim * c.query_warps // c.warps
    return (
        RegisterPhase(
            "scores",
            (
                *kept,
                ("acc_S", acc_S),
                ("acc_dP", acc_S),
                A,
                ("B", _fragment_B(c.tile_m // c.key_shares)),
            ),
        ),
        RegisterPhase("dV", (*kept, ("dS", acc_S), P, ("B", _fragment_B(wider // c.key_shares)))),
        RegisterPhase(
            "dQ",
            (
                *kept,
                ("acc_dQ", c.tile_m * c.head_dim // c.threads),
                ("A", rows_dQ * FRAGMENT_A),
                ("B", _fragment_B(columns_dQ)),
            ),
        ),
    )


def _fragment_B(columns: int) -> int:
    return columns // FRAGMENT_B_COLUMNS * FRAGMENT_B
