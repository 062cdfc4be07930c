"""A compiled kernel beside its plan: resources, and the steps of its loops by code and by model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeGuard

from hopperflash.analysis.cubin import KernelResources, inspect_cubin
from hopperflash.analysis.loop_cost import StepCost, Tile, shared_steps, step_cost
from hopperflash.plan import budget, budget_sm80
from hopperflash.plan.arch import arch_of
from hopperflash.plan.config import (
    BackwardConfig,
    BackwardConfigSm80,
    Config,
    ForwardConfig,
    ForwardConfigSm80,
    MainConfig,
)
from hopperflash.plan.cost import moved_bytes, tile_step
from hopperflash.plan.launch_plan import KernelSpec
from hopperflash.plan.units import AMPERE, HOPPER, UnitClocks


@dataclass(frozen=True)
class ModelledStep:
    """What `hopperflash.plan.cost` says of a step without a mask."""

    instructions: float
    per_score: float
    units: UnitClocks


@dataclass(frozen=True)
class KernelReport:
    """A kernel as compiled; `steps` are its loops with tensor-core work, in order of addresses."""

    name: str
    target: str
    registers: int
    """Per thread, at launch."""
    stack_bytes: int
    spill_bytes: int
    shared_bytes: int
    """Static, and what a launch asks for."""
    threads: int
    steps: tuple[StepCost, ...]
    model: ModelledStep | None
    """None for kernels without tensor-core work, and for Ampere."""


def report(spec: KernelSpec, cubin: bytes) -> KernelReport:
    """The report of the one kernel in `cubin`, which was compiled from `spec`."""
    (kernel,) = inspect_cubin(cubin)
    config, itemsize = spec.config, spec.signature.dtype.itemsize
    steps: tuple[StepCost, ...] = ()
    dynamic = 0
    if _is_main(config):
        steps = _steps(kernel, config, itemsize)
        dynamic = _dynamic_shared_memory(config, itemsize)
    return KernelReport(
        name=kernel.name,
        target=arch_of(spec.target).name,
        registers=kernel.registers,
        stack_bytes=kernel.stack_bytes,
        spill_bytes=kernel.local_bytes,
        shared_bytes=kernel.shared_bytes + dynamic,
        threads=config.threads,
        steps=steps,
        model=_model(config, itemsize),
    )


def _is_main(config: Config) -> TypeGuard[MainConfig]:
    return isinstance(config, MainConfig)


def _steps(kernel: KernelResources, config: MainConfig, itemsize: int) -> tuple[StepCost, ...]:
    tile = Tile(
        scores=config.tile_m * config.tile_n,
        moved=moved_bytes(config, itemsize),
        rates=HOPPER if isinstance(config, (ForwardConfig, BackwardConfig)) else AMPERE,
    )
    return tuple(step_cost(shares, tile) for shares in shared_steps(config, kernel.sass))


def _dynamic_shared_memory(config: MainConfig, itemsize: int) -> int:
    if isinstance(config, (ForwardConfigSm80, BackwardConfigSm80)):
        return budget_sm80.shared_memory(config, itemsize).total
    return budget.shared_memory(config, itemsize).total


def _model(config: Config, itemsize: int) -> ModelledStep | None:
    if not isinstance(config, (ForwardConfig, BackwardConfig)):
        return None
    step = tile_step(config, itemsize)
    return ModelledStep(step.instructions, step.instructions_per_score, step.units)
