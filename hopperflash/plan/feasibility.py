"""Does a configuration fit the machine? Each refusal carries the arithmetic that rules it out."""

from __future__ import annotations

from hopperflash.plan.arch import ArchSpec
from hopperflash.plan.budget import (
    SETMAXNREG_MAX,
    SETMAXNREG_STEP,
    ConfigSm90,
    RegisterBudget,
    RoleRegisterBudget,
    SharedMemoryBudget,
    registers,
    shared_memory,
)
from hopperflash.plan.config import (
    WARPGROUP_THREADS,
    WGMMA_ROWS,
    BackwardConfig,
    ForwardConfig,
    Scheduler,
)
from hopperflash.plan.support import Support
from hopperflash.problem import DType

# The K extent of one 16-bit wgmma, so the step of every contracted size, and 32 bytes, so that of
# the narrowest swizzle.
WGMMA_K = 16
WGMMA_N_MAX = 256
TMA_BOX_MAX = 256
SWIZZLE_ROWS = 8  # after which the pattern of a swizzle repeats
SETMAXNREG_MIN = 24


def check(config: ConfigSm90, arch: ArchSpec, dtype: DType) -> Support:
    """Whether `arch` can run `config`."""
    if isinstance(config, ForwardConfig):
        reasons = _forward_shape_reasons(config)
    else:
        reasons = _backward_shape_reasons(config)
    reasons += shared_memory_reasons(shared_memory(config, dtype.itemsize), arch)
    return Support.unless([*reasons, *_role_reasons(config, registers(config, arch))])


def _forward_shape_reasons(config: ForwardConfig) -> list[str]:
    reasons = []
    rows = WGMMA_ROWS * config.consumer_warpgroups
    if config.tile_m % rows:
        reasons.append(
            f"tile_m {config.tile_m} is not a multiple of {rows}: {config.consumer_warpgroups}"
            f" consumer warpgroups of {WGMMA_ROWS} rows (wgmma)"
        )
    reasons += _size_reasons("tile_n", config.tile_n, 1, WGMMA_K)
    reasons += _size_reasons("head_dim", config.head_dim, 1, WGMMA_K)
    reasons += _size_reasons("head_dim_v", config.head_dim_v, 1, WGMMA_K)
    reasons += _share_reasons("tile_n", config.tile_n, config.cluster_m)
    if config.cluster_m > 1 and config.scheduler is Scheduler.DYNAMIC:
        reasons.append(f"dynamic CTAs take tiles one by one, not {config.cluster_m} at a time")
    return reasons + _box_reasons("tile_m", config.tile_m)


def _backward_shape_reasons(config: BackwardConfig) -> list[str]:
    """Rules of S, dP, dV and dK and of dQ (tile_m rows)."""
    c = config
    if c.consumer_warpgroups % c.key_warpgroups:
        return [
            f"{c.consumer_warpgroups} consumer warpgroups do not divide by the"
            f" {c.key_warpgroups} stacked along the keys"
        ]
    reasons = _query_row_reasons(c) if c.query_rows else _key_row_reasons(c)
    reasons += _dq_reasons(c)
    reasons += _share_reasons("tile_m", c.tile_m, c.cluster_n)
    # Queries of S, a swizzle of which no two warpgroups share, and the depth of dV and dK.
    reasons += _size_reasons("tile_m", c.tile_m, c.key_shares, WGMMA_K)
    shares_dq = max(c.key_shares, c.query_shares)
    reasons += _size_reasons("head_dim", c.head_dim, shares_dq, WGMMA_K)
    reasons += _size_reasons("head_dim_v", c.head_dim_v, c.key_shares, WGMMA_K)
    return [*reasons, *_box_reasons("tile_n", c.tile_n), *_box_reasons("tile_m", c.tile_m)]


def _key_row_reasons(config: BackwardConfig) -> list[str]:
    c = config
    if c.tile_n == WGMMA_ROWS * c.key_warpgroups:
        return []
    return [
        f"tile_n {c.tile_n} is not {WGMMA_ROWS * c.key_warpgroups}: {c.key_warpgroups} warpgroups"
        f" of {WGMMA_ROWS} keys (wgmma)"
    ]


def _query_row_reasons(config: BackwardConfig) -> list[str]:
    """All rows are each warpgroup's: its share is of the keys."""
    c, reasons = config, []
    if c.key_warpgroups != c.consumer_warpgroups:
        reasons.append(
            f"with queries as rows all {c.consumer_warpgroups} consumer warpgroups split the keys,"
            f" not {c.key_warpgroups}"
        )
    rows = {"tile_m": c.tile_m, "head_dim": c.head_dim, "head_dim_v": c.head_dim_v}
    reasons += [
        f"{name} {size} is not a multiple of {WGMMA_ROWS}: rows of S, dV^T or dK^T (wgmma)"
        for name, size in rows.items()
        if size % WGMMA_ROWS
    ]
    return reasons + _size_reasons("tile_n", c.tile_n, c.key_warpgroups, WGMMA_K)


def _dq_reasons(config: BackwardConfig) -> list[str]:
    """Rows of dQ are queries, of dQ^T head dims."""
    c = config
    if c.dq_swap_ab:
        if c.head_dim % WGMMA_ROWS == 0:
            return []
        return [f"head_dim {c.head_dim} is not a multiple of {WGMMA_ROWS}: dQ^T's rows (wgmma)"]
    row_blocks, workers = c.tile_m // WGMMA_ROWS, c.dq_warpgroups
    if c.tile_m % WGMMA_ROWS or not row_blocks:
        return [f"tile_m {c.tile_m} is not a multiple of {WGMMA_ROWS}: dQ's rows (wgmma)"]
    if workers % row_blocks:
        return [
            f"tile_m {c.tile_m} is {row_blocks} times {WGMMA_ROWS} rows of dQ, which"
            f" cannot be shared evenly by the warpgroups that compute it: {workers}"
        ]
    return []


def _share_reasons(name: str, size: int, ctas: int) -> list[str]:
    """Of what the CTAs of a cluster load together."""
    if size % (SWIZZLE_ROWS * ctas) == 0:
        return []
    return [
        f"{name} {size} does not divide by {ctas} CTAs that load multiples of {SWIZZLE_ROWS} rows"
    ]


def _size_reasons(name: str, size: int, shares: int, step: int) -> list[str]:
    """Columns of a wgmma, split evenly between `shares` warpgroups."""
    if size % (shares * step) == 0 and 0 < size <= shares * WGMMA_N_MAX:
        return []
    split = f" / {shares} warpgroups" if shares > 1 else ""
    return [f"{name} {size}{split} is not a multiple of {step} in {step}..{WGMMA_N_MAX} (wgmma)"]


def _box_reasons(name: str, size: int) -> list[str]:
    if size <= TMA_BOX_MAX:
        return []
    return [f"{name} {size} exceeds the {TMA_BOX_MAX} rows of a TMA box"]


def shared_memory_reasons(budget: SharedMemoryBudget, arch: ArchSpec) -> list[str]:
    """Empty where a block may have that much."""
    if budget.total <= arch.smem_bytes_per_block:
        return []
    return [
        f"shared memory {budget} = {budget.total} B aligned exceeds the"
        f" {arch.smem_bytes_per_block} B per block of {arch.name}"
    ]


def _role_reasons(config: ConfigSm90, budget: RoleRegisterBudget) -> list[str]:
    reasons = []
    for role, count in (
        ("producer", config.registers_producer),
        ("consumer", config.registers_consumer),
    ):
        if count % SETMAXNREG_STEP or not SETMAXNREG_MIN <= count <= SETMAXNREG_MAX:
            reasons.append(
                f"{count} {role} registers are not a multiple of {SETMAXNREG_STEP} in"
                f" {SETMAXNREG_MIN}..{SETMAXNREG_MAX} (setmaxnreg)"
            )
    if budget.claimed > budget.pool:
        reasons.append(
            f"the roles claim {budget.claimed} registers, {WARPGROUP_THREADS} *"
            f" ({config.registers_producer} + {config.consumer_warpgroups} *"
            f" {config.registers_consumer}), of {budget.pool} that {config.threads} threads"
            " are launched with"
        )
    return reasons + register_reasons(budget, "consumer thread")


def register_reasons(budget: RegisterBudget, thread: str) -> list[str]:
    """Empty where a thread may have that many."""
    if budget.total <= budget.limit:
        return []
    return [
        f"a {thread} needs {budget.peak} + overhead {budget.overhead} ="
        f" {budget.total} registers ({budget.peak.name}) and has {budget.limit}"
    ]
