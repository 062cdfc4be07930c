"""`hopperflash compile`: a problem's kernels, what the compiler made of them, and the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from hopperflash.cli.explain import ExplainOptions, plan_of
from hopperflash.cli.options import DTypeName, SmMargin, command, flag, size
from hopperflash.cli.output import print_json, stages, stdout
from hopperflash.errors import UnsupportedProblem

if TYPE_CHECKING:
    from hopperflash.analysis.kernel_report import KernelReport, ModelledStep
    from hopperflash.analysis.loop_cost import StepCost
    from hopperflash.plan import KernelSpec


@dataclass(frozen=True)
class CompileOptions:
    """What `hopperflash compile` takes: lengths play no part."""

    arch: Annotated[str, flag("Target, such as sm_90a or sm_80.")] = "sm_90a"
    direction: Annotated[str, flag("forward or backward.")] = "forward"
    dtype: Annotated[DTypeName, flag("Element type.")] = DTypeName.BF16
    head_dim: Annotated[int, flag("Head dim, a multiple of 8 to 256.")] = 128
    head_dim_v: Annotated[int | None, flag("Head dim of V.", show_default="head_dim")] = None
    causal: Annotated[bool | None, flag("Mask.", "--causal/--full", show_default="causal")] = None
    window: Annotated[str | None, flag("LEFT,RIGHT keys a query sees; -1 is unbounded.")] = None
    softcap: Annotated[float, flag("Caps scores at this; 0 for none.")] = 0.0
    sm_margin: SmMargin = 0
    varlen: Annotated[bool, flag("Packed sequences.", "--varlen")] = False
    heads: Annotated[int | None, size("Query heads.", 2)] = None
    kv_heads: Annotated[int | None, size("Key heads; divides heads.", "heads")] = None
    deterministic: Annotated[bool, flag("Gradients in a fixed order.", "--deterministic")] = False
    backend: Annotated[str | None, flag("sm90 or sm80; by default the first able one.")] = None
    out: Annotated[Path | None, flag("Write PTX, cubin and SASS into this folder.")] = None
    json: Annotated[bool, flag("Print one JSON document.", "--json")] = False


@command(CompileOptions)
def compile_kernels(options: CompileOptions) -> None:
    """Compile the kernels of a problem, without a GPU, and print what the compiler made of them.

    Registers, spills, shared memory; for each loop with tensor-core work the instructions of a
    thread by pipe, for each score, and the clocks for which a step keeps each unit of an SM busy,
    beside what the model of the plan says.
    """
    specs = _specs(options)
    reports = []
    with stages() as progress:
        for done, spec in enumerate(specs):
            progress.enter(f"compiling {spec.ref.name}")
            progress.advance(done, len(specs))
            reports.append(_compiled(spec, options.out))
    if options.json:
        print_json({"kernels": reports})
        return
    for report in reports:
        for line in _lines(report):
            stdout().print(line, markup=False)


def _specs(options: CompileOptions) -> list[KernelSpec]:
    heads = options.heads or 2
    planned = plan_of(
        ExplainOptions(
            heads=heads,
            kv_heads=options.kv_heads or heads,
            head_dim=options.head_dim,
            head_dim_v=options.head_dim_v,
            dtype=options.dtype,
            causal=options.causal,
            window=options.window,
            softcap=options.softcap,
            sm_margin=options.sm_margin,
            seqlens="512" if options.varlen else None,
            arch=options.arch,
            direction=options.direction,
            deterministic=options.deterministic,
            backend=options.backend,
        )
    )
    specs = list(dict.fromkeys(call.spec for call in planned.calls))
    if not specs:
        raise UnsupportedProblem(f"nothing to compile: backend {planned.backend} has no kernels")
    return specs


def _compiled(spec: KernelSpec, folder: Path | None) -> KernelReport:
    from hopperflash.analysis import disassembly, report
    from hopperflash.runtime.compile import compile_kernel

    ptx, cubin = compile_kernel(spec).artifacts
    found = report(spec, cubin)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        stem = folder / f"{found.name}.{found.target}"
        stem.with_name(stem.name + ".ptx").write_text(ptx)
        stem.with_name(stem.name + ".cubin").write_bytes(cubin)
        stem.with_name(stem.name + ".sass").write_text(disassembly(cubin))
    return found


def _lines(report: KernelReport) -> Iterator[str]:
    yield f"{report.name} for {report.target}"
    yield (
        f"  {report.registers} registers, {report.stack_bytes} B of stack,"
        f" {report.spill_bytes} B spilled, {report.shared_bytes} B of shared memory,"
        f" {report.threads} threads"
    )
    for step in report.steps:
        yield f"  {step.name} loop at {step.begin:#x}"
        yield from (f"    {label:<13}{text}" for label, text in _facts(step, report.model))


def _facts(step: StepCost, model: ModelledStep | None) -> Iterator[tuple[str, str]]:
    modelled = ""
    if model is not None and not step.masked:
        modelled = f"; model {model.instructions:.0f}, {model.per_score:.2f}"
    counted = f"{step.instructions:.0f} a thread, {step.per_score:.2f} a score"
    passed_over = f", {step.conditional:.0f} of them not always" if step.conditional else ""
    yield "instructions", f"{counted}{passed_over}{modelled}"
    yield "by pipe", _listed(step.pipes)
    faults = [f"{step.spills} spills"] if step.spills else []
    faults += ["wgmma serialised"] if step.serialised else []
    yield "tensor work", ", ".join([_listed(step.tensor_shapes), *faults])
    yield "clocks", f"{step.units}: bound by {step.units.bound.unit}"
    if model is not None and not step.masked:
        yield "model", f"{model.units}: bound by {model.units.bound.unit}"


def _listed(counts: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {count:.0f}" for name, count in counts.items())
