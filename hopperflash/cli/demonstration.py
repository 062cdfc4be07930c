"""What a demonstration runs and measures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from hopperflash import api
from hopperflash.analysis.traffic import Traffic, materialized_traffic
from hopperflash.cli.demo_reference import Cotangents, deviations
from hopperflash.cli.inputs import Inputs
from hopperflash.cli.output import Stages
from hopperflash.emulator import EmulationRun
from hopperflash.errors import InvalidArgument, UnsupportedProblem
from hopperflash.plan import ForwardConfig, ForwardConfigSm80, LaunchPlan, arch_of
from hopperflash.plan.block_range import Tiling, key_block_totals, query_block_totals
from hopperflash.plan.config import MainConfig
from hopperflash.problem import Direction
from hopperflash.runtime.compile import compile_kernel
from hopperflash.runtime.emulation import emulate
from hopperflash.tolerance import Deviation


@dataclass(frozen=True)
class Tiles:
    """Score tiles over all heads; `executed` follows from the MMA FLOPs, None on a GPU."""

    planned: int
    skipped: int
    executed: float | None

    @property
    def agree(self) -> bool:
        return self.executed is None or self.executed == self.planned


@dataclass(frozen=True)
class Part:
    """One direction: its plan, and the emulator's counters while it ran, None on a GPU."""

    plan: LaunchPlan
    counters: dict[str, int] | None

    @property
    def traffic(self) -> Traffic | None:
        """Global-memory bytes the emulator counted."""
        counters = self.counters
        if counters is None:
            return None
        return Traffic(
            counters["tma_load_bytes"] + counters["global_load_bytes"],
            counters["tma_store_bytes"]
            + counters["global_store_bytes"]
            + counters["global_atomic_bytes"],
        )

    @property
    def materialized(self) -> Traffic:
        """What the materialised algorithm would move."""
        return materialized_traffic(self.plan.problem, self.plan.direction)

    @property
    def useful_flops(self) -> int:
        """Multiply-adds over visible pairs, counted twice."""
        return self.plan.problem.useful_flops(self.plan.direction)

    @property
    def executed_flops(self) -> int | None:
        """What the tensor cores did, by wgmma or mma.sync."""
        if self.counters is None:
            return None
        return self.counters["wgmma_flops"] + self.counters["mma_flops"]

    @property
    def tiles(self) -> Tiles:
        """Score tiles planned, skipped and executed, of the kernel that has them."""
        problem = self.plan.problem
        (config,) = (
            call.spec.config for call in self.plan.calls if isinstance(call.spec.config, MainConfig)
        )
        folded = config.group if isinstance(config, ForwardConfig | ForwardConfigSm80) else 1
        queries = config.tile_m // folded
        tiling = Tiling(problem.seqlen_q, problem.seqlen_k, queries, config.tile_n)
        if isinstance(config, ForwardConfig | ForwardConfigSm80):
            totals = key_block_totals(problem.mask, tiling)
            columns = config.head_dim + config.head_dim_v
        else:
            totals = query_block_totals(problem.mask, tiling)
            columns = 3 * config.head_dim + 2 * config.head_dim_v
        heads, executed = problem.batch * problem.heads_q // folded, self.executed_flops
        flops = 2 * config.tile_m * config.tile_n * columns
        return Tiles(
            planned=heads * totals.visited,
            skipped=heads * totals.skipped,
            executed=None if executed is None else executed / flops,
        )


@dataclass(frozen=True)
class Demonstration:
    """Results of one problem; `run` is the emulator's, None on a GPU.

    `seconds` is wall time of "compile", "forward", "backward" and "reference".
    """

    forward: Part
    backward: Part | None
    device: str
    run: EmulationRun | None
    deviations: dict[str, Deviation]
    seconds: dict[str, float]

    @property
    def parts(self) -> tuple[Part, ...]:
        """The directions that ran."""
        return (self.forward,) if self.backward is None else (self.forward, self.backward)

    @property
    def failures(self) -> list[str]:
        """Everything that is not as it should be, one line each."""
        found = [
            f"{name} is outside the tolerance: {_excess(deviation)}"
            for name, deviation in self.deviations.items()
            if not deviation.ok
        ]
        if self.run is not None and self.run.hazards:
            found.append(f"{len(self.run.hazards)} hazards, first: {self.run.hazards[0]}")
        found += [
            f"{part.plan.direction}: {tiles.executed:g} tiles executed, {tiles.planned} planned"
            for part in self.parts
            if not (tiles := part.tiles).agree
        ]
        return found


@dataclass(frozen=True)
class Execution:
    """How a demonstration runs: the target, and the emulator's schedule and seed."""

    arch: str
    schedule: str
    seed: int
    backward: bool


def demonstrate(inputs: Inputs, execution: Execution, progress: Stages) -> Demonstration:
    """Plans, compiles and executes the forward and perhaps the backward; compares with fp64.

    Raises what planning raises, `UnsupportedProblem` for a problem that launches nothing, and
    `InvalidArgument` for values that the reference cannot judge.
    """
    device = _device_of(execution.arch)
    run = None
    with ExitStack() as stack:
        if device.type == "cpu":
            e = execution
            run = stack.enter_context(
                emulate(e.arch, schedule=e.schedule, seed=e.seed, progress=progress.advance)
            )
        operands = inputs.to(device)
        directions: tuple[Direction, ...] = ("forward", "backward")
        plans = [
            api.make_plan(*operands.operands, causal=inputs.causal, direction=direction)
            for direction in directions[: 1 + execution.backward]
        ]
        if not plans[0].calls:
            raise UnsupportedProblem("nothing to run:", plans[0].steps.reasons)
        _require_finite(inputs)
        problem = plans[0].problem
        cotangents = Cotangents.random(problem, execution.seed) if execution.backward else None
        seconds = _compile(plans, progress)
        progress.enter("executing CTAs")
        if run is None:
            _execute(operands, cotangents, None)  # the first call also loads the kernels
        results, counters, executing = _execute(operands, cotangents, run)
    progress.enter("computing the fp64 reference")
    start = perf_counter()
    found = deviations(results, inputs, cotangents, problem)
    parts = [Part(plan, counted) for plan, counted in zip(plans, counters, strict=True)]
    return Demonstration(
        forward=parts[0],
        backward=parts[1] if execution.backward else None,
        device=torch.cuda.get_device_name(device) if run is None else "emulator",
        run=run,
        deviations=found,
        seconds={**seconds, **executing, "reference": perf_counter() - start},
    )


def _device_of(arch: str) -> torch.device:
    """The first GPU if it is of this arch, else the CPU."""
    if torch.cuda.is_available():
        capability = torch.cuda.get_device_capability(0)
        if arch_of(arch).compute_capability == capability:
            return torch.device("cuda", 0)
    return torch.device("cpu")


def _require_finite(inputs: Inputs) -> None:
    named = zip("qkv", inputs.operands, strict=True)
    reasons = [f"{name} holds NaN or Inf" for name, x in named if not x.isfinite().all()]
    if reasons:
        raise InvalidArgument("these values cannot be compared with fp64:", reasons)


def _compile(plans: list[LaunchPlan], progress: Stages) -> dict[str, float]:
    """Every kernel of the plans; returns the seconds it took."""
    start = perf_counter()
    for call in (call for plan in plans for call in plan.calls):
        progress.enter(f"compiling {call.spec.ref.name} for {call.spec.target}")
        compile_kernel(call.spec)
    return {"compile": perf_counter() - start}


def _execute(
    inputs: Inputs, cotangents: Cotangents | None, run: EmulationRun | None
) -> tuple[dict[str, Tensor], list[dict[str, int] | None], dict[str, float]]:
    """Complete results, and the counters and seconds of each direction."""
    backward = cotangents is not None
    q, k, v = (x.detach().requires_grad_(backward) for x in inputs.operands)
    counters: list[dict[str, int] | None] = []
    seconds: dict[str, float] = {}
    with _measured("forward", inputs, run, counters, seconds):
        out, lse = api.flash_attn_func(q, k, v, causal=inputs.causal, return_lse=True)
    results = {"O": out, "LSE": lse}
    if cotangents is not None:
        incoming = tuple(x.to(out.device) for x in (cotangents.dout, cotangents.dlse))
        with _measured("backward", inputs, run, counters, seconds):
            gradients = torch.autograd.grad((out, lse), (q, k, v), incoming)
        results |= zip(("dQ", "dK", "dV"), gradients, strict=True)
    return results, counters, seconds


@contextmanager
def _measured(
    part: str,
    inputs: Inputs,
    run: EmulationRun | None,
    counters: list[dict[str, int] | None],
    seconds: dict[str, float],
) -> Iterator[None]:
    """Adds what the block counted and how long it took, to its last launch's end."""
    before = {} if run is None else dict(run.counters)
    start = perf_counter()
    yield
    if inputs.q.is_cuda:
        torch.cuda.synchronize(inputs.q.device)
    seconds[part] = perf_counter() - start
    counted = None
    if run is not None:
        counted = {name: value - before.get(name, 0) for name, value in run.counters.items()}
    counters.append(counted)


def _excess(deviation: Deviation) -> str:
    """Which part of the tolerance rule a result breaks."""
    if deviation.nonfinite_mismatches:
        return f"{deviation.nonfinite_mismatches} NaN or Inf differ from the reference's"
    if deviation.max_error > deviation.max_bound:
        return f"max error {deviation.max_error:.3g} > {deviation.max_bound:.3g}"
    return f"rms error {deviation.rms_error:.3g} > {deviation.rms_bound:.3g}"
