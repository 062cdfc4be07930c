"""What a demonstration runs and measures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import product
from time import perf_counter

import torch
from torch import Tensor

from hopperflash import api
from hopperflash.analysis.traffic import Traffic, materialized_traffic
from hopperflash.cli.inputs import Inputs
from hopperflash.cli.output import Stages
from hopperflash.emulator import EmulationRun
from hopperflash.errors import InvalidArgument, UnsupportedProblem
from hopperflash.plan import ForwardConfig, ForwardConfigSm80, LaunchPlan, arch_of
from hopperflash.plan.block_range import Tiling, block_totals
from hopperflash.problem import AttnProblem
from hopperflash.reference import low_precision_attention, materialized_attention
from hopperflash.runtime.compile import compile_kernel
from hopperflash.runtime.emulation import emulate
from hopperflash.tolerance import Deviation, tolerance


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
class Demonstration:
    """Results of one problem; `run` holds the emulator's counters, None on a GPU.

    `seconds` is wall time of "compile", "execute" and "reference".
    """

    plan: LaunchPlan
    device: str
    run: EmulationRun | None
    deviations: dict[str, Deviation]
    tiles: Tiles
    materialized: Traffic
    seconds: dict[str, float]

    @property
    def traffic(self) -> Traffic | None:
        """Global-memory bytes the emulator counted."""
        if self.run is None:
            return None
        counters = self.run.counters
        return Traffic(
            counters["tma_load_bytes"] + counters["global_load_bytes"],
            counters["tma_store_bytes"] + counters["global_store_bytes"],
        )

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
        if not self.tiles.agree:
            found.append(f"{self.tiles.executed:g} tiles executed, {self.tiles.planned} planned")
        return found


def demonstrate(
    inputs: Inputs, arch: str, schedule: str, seed: int, progress: Stages
) -> Demonstration:
    """Plans, compiles and executes the forward; compares with fp64.

    Raises what planning raises, `UnsupportedProblem` for a problem that launches nothing, and
    `InvalidArgument` for values that the reference cannot judge.
    """
    device = _device_of(arch)
    seconds: dict[str, float] = {}
    run = None
    with ExitStack() as stack:
        if device.type == "cpu":
            run = stack.enter_context(
                emulate(arch, schedule=schedule, seed=seed, progress=progress.advance)
            )
        operands = tuple(operand.to(device) for operand in inputs.operands)
        plan = api.make_plan(*operands, causal=inputs.causal)
        if not plan.calls:
            raise UnsupportedProblem("nothing to run:", plan.steps.reasons)
        _require_finite(inputs)
        progress.enter(f"compiling {plan.calls[0].spec.ref.name} for {plan.arch.name}")
        with _timed(seconds, "compile"):
            for call in plan.calls:
                compile_kernel(call.spec)
        progress.enter("executing CTAs")
        if run is None:
            _attention(operands, inputs.causal)  # the first call also loads the kernel
        with _timed(seconds, "execute"):
            results = _attention(operands, inputs.causal)
    progress.enter("computing the fp64 reference")
    with _timed(seconds, "reference"):
        deviations = _deviations(results, inputs, plan.problem)
    return Demonstration(
        plan=plan,
        device=torch.cuda.get_device_name(device) if run is None else "emulator",
        run=run,
        deviations=deviations,
        tiles=_tiles(plan, run),
        materialized=materialized_traffic(plan.problem),
        seconds=seconds,
    )


def mma_flops(run: EmulationRun) -> int:
    """Work of the tensor cores, by wgmma or mma.sync."""
    return run.counters["wgmma_flops"] + run.counters["mma_flops"]


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


@contextmanager
def _timed(seconds: dict[str, float], part: str) -> Iterator[None]:
    start = perf_counter()
    yield
    seconds[part] = perf_counter() - start


def _attention(operands: Sequence[Tensor], causal: bool) -> tuple[Tensor, Tensor]:
    """(out, lse), complete."""
    q, k, v = operands
    out, lse = api.flash_attn_func(q, k, v, causal=causal, return_lse=True)
    if q.is_cuda:
        torch.cuda.synchronize(q.device)
    return out, lse


def _deviations(
    results: tuple[Tensor, Tensor], inputs: Inputs, problem: AttnProblem
) -> dict[str, Deviation]:
    """Deviation of O and LSE over all heads."""
    per_head = [_references(inputs, problem, b, h) for b, h in _key_heads(problem)]
    ref_out, ref_lse, low_out, low_lse = (
        _assemble(parts, problem, head_axis)
        for parts, head_axis in zip(zip(*per_head, strict=True), (2, 1, 2, 1), strict=True)
    )
    out, lse = results
    try:
        return {"O": tolerance(out, ref_out, low_out), "LSE": tolerance(lse, ref_lse, low_lse)}
    except ValueError as unjudgeable:
        raise InvalidArgument(f"these values give no tolerance: {unjudgeable}") from None


def _key_heads(problem: AttnProblem) -> Iterator[tuple[int, int]]:
    return product(range(problem.batch), range(problem.heads_k))


def _references(
    inputs: Inputs, problem: AttnProblem, entry: int, head: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """fp64 and low-precision (out, lse) of one key head: a score matrix of its own at a time."""
    batch = slice(entry, entry + 1)
    q = inputs.q[batch, :, head * problem.group : (head + 1) * problem.group]
    k, v = (operand[batch, :, head : head + 1] for operand in (inputs.k, inputs.v))
    scale = problem.softmax_scale
    return (
        *materialized_attention(q, k, v, problem.mask, softmax_scale=scale),
        *low_precision_attention(q, k, v, problem.mask, softmax_scale=scale),
    )


def _assemble(parts: Sequence[Tensor], problem: AttnProblem, head_axis: int) -> Tensor:
    """Per-head results, key heads fastest, as one tensor."""
    entries = [parts[i : i + problem.heads_k] for i in range(0, len(parts), problem.heads_k)]
    return torch.cat([torch.cat(list(entry), dim=head_axis) for entry in entries])


def _tiles(plan: LaunchPlan, run: EmulationRun | None) -> Tiles:
    (call,) = plan.calls
    config, problem = call.spec.config, plan.problem
    assert isinstance(config, (ForwardConfig, ForwardConfigSm80))
    tiling = Tiling(problem.seqlen_q, problem.seqlen_k, config.tile_m, config.tile_n)
    totals = block_totals(problem.mask, tiling)
    heads = problem.batch * problem.heads_q
    flops = 2 * config.tile_m * config.tile_n * (config.head_dim + config.head_dim_v)
    return Tiles(
        planned=heads * totals.visited,
        skipped=heads * totals.skipped,
        executed=None if run is None else mma_flops(run) / flops,
    )


def _excess(deviation: Deviation) -> str:
    """Which part of the tolerance rule a result breaks."""
    if deviation.nonfinite_mismatches:
        return f"{deviation.nonfinite_mismatches} NaN or Inf differ from the reference's"
    if deviation.max_error > deviation.max_bound:
        return f"max error {deviation.max_error:.3g} > {deviation.max_bound:.3g}"
    return f"rms error {deviation.rms_error:.3g} > {deviation.rms_bound:.3g}"
