"""What the threads of a kernel do and where its operands come from, in words for `explain`."""

from __future__ import annotations

from collections.abc import Iterator

from hopperflash.plan.arch import ArchSpec
from hopperflash.plan.budget import registers
from hopperflash.plan.config import (
    WGMMA_ROWS,
    BackwardConfig,
    BackwardConfigSm80,
    ForwardConfig,
    ForwardConfigSm80,
    MainConfig,
    Scheduler,
)


def operand_notes(config: MainConfig) -> str:
    """Stages, and operands that do not come from shared memory as a matter of course."""
    if isinstance(config, ForwardConfig):
        source = f"P V takes P from {config.p_operand.value}"
        notes = [f"{config.stages_kv} stages of K and of V", source]
        notes += ["warpgroups issue GEMMs in turns"] * config.ping_pong
        notes += ["factors that rescale O by FMA, as the MUFU would bind"] * config.factors_on_fma
        return "; ".join(notes)
    if isinstance(config, ForwardConfigSm80):
        Q = "registers, loaded once" if config.q_in_registers else "shared memory"
        return f"{config.stages_kv} stages of K and of V; Q K^T takes Q from {Q}"
    notes = [f"{config.stages} stages of Q and of dO"]
    notes += [f"dV and dK take P and dS from {config.p_operand.value}"]
    if isinstance(config, BackwardConfig) and config.query_rows:
        notes += ["queries are the rows of S, head dims those of dV^T and dK^T"]
    return "; ".join(notes)


def roles(config: MainConfig, arch: ArchSpec) -> Iterator[str]:
    """Who loads, multiplies and stores."""
    if isinstance(config, ForwardConfig):
        yield from _hopper_forward(config, arch)
    elif isinstance(config, BackwardConfig):
        yield from _hopper_backward(config, arch)
    else:
        share = _ampere_share(config)
        yield (
            f"{config.warps} warps of {share} each; all of them load (cp.async), compute"
            " (mma.sync, softmax) and store"
        )


def _hopper_forward(config: ForwardConfig, arch: ArchSpec) -> Iterator[str]:
    rows = config.tile_m // config.consumer_warpgroups
    yield f"warpgroup 0: producer (TMA loads), {config.registers_producer} registers"
    yield (
        f"warpgroups 1-{config.consumer_warpgroups}: consumers of {rows} rows each (wgmma,"
        f" softmax, store), {config.registers_consumer} registers"
    )
    yield _claim(config, arch)


def _hopper_backward(config: BackwardConfig, arch: ArchSpec) -> Iterator[str]:
    persistent = config.scheduler is Scheduler.PERSISTENT
    load = "warp 0 loads Q and dO, warp 1 K and V" if persistent else "warp 0 loads"
    yield f"warpgroup 0: {load} (TMA), {config.registers_producer} registers"
    keys = _keys(config.tile_n // config.key_warpgroups, config.key_shares)
    yield (
        f"warpgroups 1-{config.consumer_warpgroups}: consumers of {keys} each"
        f" (wgmma, softmax, store), {config.registers_consumer} registers"
    )
    if config.needs("dq"):
        yield f"{_dq_workers(config)} and adds it to global memory"
    yield _claim(config, arch)


def _dq_workers(config: BackwardConfig) -> str:
    if config.dq_swap_ab:
        of = f"of {WGMMA_ROWS} head dims of dQ^T = K^T dS^T"
        return f"every consumer has some of {config.head_dim // WGMMA_ROWS} parts {of}"
    return "every consumer has a part of dQ" if config.dq_alike else "warpgroup 1 computes dQ"


def _ampere_share(config: ForwardConfigSm80 | BackwardConfigSm80) -> str:
    if isinstance(config, ForwardConfigSm80):
        return f"{config.tile_m // config.warps} rows"
    return _keys(config.tile_n // config.key_warps, config.key_shares)


def _keys(keys: int, shares: int) -> str:
    return f"{keys} keys" + (f" and 1/{shares} of the columns" if shares > 1 else "")


def _claim(config: ForwardConfig | BackwardConfig, arch: ArchSpec) -> str:
    budget = registers(config, arch)
    return f"{config.threads} threads claim {budget.claimed} registers of {budget.pool}"
