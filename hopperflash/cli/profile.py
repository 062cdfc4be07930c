"""`hopperflash profile`: our kernels under NVIDIA's profilers, beside the models of the plan."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hopperflash import plan
from hopperflash.cli.explain import ExplainOptions, plan_of
from hopperflash.cli.options import ProblemOptions, Seed, command, flag
from hopperflash.cli.output import print_json, stages, stderr, stdout
from hopperflash.cli.profile_report import as_data, show_comparisons, show_passes
from hopperflash.errors import InvalidArgument, UnsupportedProblem
from hopperflash.problem import Direction
from hopperflash.profiler import iket as iket_tool
from hopperflash.profiler import ncu as ncu_tool
from hopperflash.profiler import nsys as nsys_tool
from hopperflash.profiler import tools
from hopperflash.profiler.tools import Command, ProfilerFailed

if TYPE_CHECKING:
    from hopperflash.profiler.comparison import Comparison
    from hopperflash.profiler.ncu import KernelProfile
    from hopperflash.profiler.passes import Attention

WITHOUT_A_GPU = (
    "without one: `--dry-run` prints the command, `--report FILE` reads a report from elsewhere"
)
_DIRECTIONS: dict[str, tuple[Direction, ...]] = {
    "forward": ("forward",),
    "backward": ("backward",),
    "both": ("forward", "backward"),
}
_CONTROLS = {"cache_control": ("all", "none"), "clock_control": ("base", "none")}

app = typer.Typer(
    help="Kernels under NVIDIA's profilers; see docs/profiling.md.", no_args_is_help=True
)


@dataclass(frozen=True)
class TargetOptions(ProblemOptions):
    """What runs under a profiler."""

    direction: Annotated[str, flag("forward, backward or both.")] = "both"
    deterministic: Annotated[bool, flag("Gradients in a fixed order.", "--deterministic")] = False
    backend: Annotated[str | None, flag("sm90 or sm80; by default the first able one.")] = None
    iterations: Annotated[int, typer.Option(help="Calls that are profiled.", min=1)] = 1
    warm_up: Annotated[int, typer.Option(help="Calls before them.", min=0)] = 3
    seed: Seed = 0


@dataclass(frozen=True)
class NcuOptions(TargetOptions):
    """What `hopperflash profile ncu` takes."""

    arch: Annotated[
        str | None, flag("Target of the models.", show_default="the GPU's, or sm_90a")
    ] = None
    all_sections: Annotated[
        bool, flag("All that ncu can collect, for its UI; takes long.", "--all-sections")
    ] = False
    lineinfo: Annotated[
        bool, flag("Compile with line numbers; stalls by line in the UI.", "--lineinfo")
    ] = False
    cache_control: Annotated[
        str, flag("all: caches are emptied before each pass over a kernel; none: they are not.")
    ] = "all"
    clock_control: Annotated[
        str, flag("base: clocks are locked, and below what the GPU boosts to; none: they are not.")
    ] = "base"
    out: Annotated[Path, flag("The report to write.")] = Path("hopperflash.ncu-rep")
    report: Annotated[
        Path | None, flag("Read this report, or what ncu prints of one with --page raw --csv.")
    ] = None
    emulated: Annotated[
        bool, flag("Count in the emulator; bytes alone, no GPU needed.", "--emulated")
    ] = False
    dry_run: Annotated[bool, flag("Print the command and end.", "--dry-run")] = False
    json: Annotated[bool, flag("Print one JSON document.", "--json")] = False


@dataclass(frozen=True)
class NsysOptions(TargetOptions):
    """What `hopperflash profile nsys` takes."""

    iterations: Annotated[int, typer.Option(help="Calls that are profiled.", min=1)] = 20
    out: Annotated[Path, flag("The report to write.")] = Path("hopperflash.nsys-rep")
    report: Annotated[
        Path | None, flag("Read this report, or the tables that nsys stats put beside it.")
    ] = None
    dry_run: Annotated[bool, flag("Print the command and end.", "--dry-run")] = False
    json: Annotated[bool, flag("Print one JSON document.", "--json")] = False


@dataclass(frozen=True)
class IketOptions(TargetOptions):
    """What `hopperflash profile iket` takes."""

    warm_up: Annotated[int, typer.Option(help="Calls before them, traced too.", min=0)] = 0
    out: Annotated[Path, flag("The folder to write into; what is in it goes.")] = Path(
        "hopperflash-iket"
    )
    dry_run: Annotated[bool, flag("Print the command and end.", "--dry-run")] = False


@command(NcuOptions)
def ncu(options: NcuOptions) -> None:
    """Nsight Compute: what each kernel moved and which units were busy, beside the models.

    Bytes between SMs and L2 and of DRAM stand beside those that `hopperflash io` prints; busy units
    beside the plan's clocks. Needs a GPU, ncu and the permission to read counters, unless a report
    is given or the emulator counts.
    """
    _check(options, emulated=options.emulated, report=options.report)
    if options.report is not None:
        _show(_compared(ncu_tool.read(options.report), options), options)
        return
    arch = _arch(options.arch)
    plans = _plans(options, arch)
    if options.dry_run:
        stdout().print(str(_ncu_command(options, arch)), markup=False)
    elif options.emulated:
        _show(_emulated(options, plans), options)
    else:
        _require(tools.obstacles(ncu_tool.TOOL, counters=True), f"{WITHOUT_A_GPU}, `--emulated`"
                 " counts bytes in the emulator")  # fmt: skip
        tools.run(_ncu_command(options, arch))
        _show(_compared(ncu_tool.read(options.out), options), options)
        stderr().print(f"for ncu-ui: {options.out}", markup=False)


@command(NsysOptions)
def nsys(options: NsysOptions) -> None:
    """Nsight Systems: each pass on the GPU and on the host, its launches, and gaps between them.

    Needs a GPU and nsys, and no permission, unless a report is given.
    """
    _check(options, report=options.report)
    if options.report is None:
        _plans(options, _arch())
        made = nsys_tool.command(target_command(options), options.out)
        if options.dry_run:
            stdout().print(str(made), markup=False)
            return
        _require(tools.obstacles(nsys_tool.TOOL, counters=False), WITHOUT_A_GPU)
        tools.run(made)
    found = nsys_tool.read(options.report or options.out)
    if options.json:
        print_json({"passes": found})
    else:
        show_passes(found, stdout())


@command(IketOptions)
def iket(options: IketOptions) -> None:
    """IKET, of CuTe DSL: when each warp of a kernel began and ended, as a page for Perfetto.

    Needs a Hopper GPU. The kernels have no marks in their bodies: docs/profiling.md says how to put
    some there.
    """
    _check(options)
    _plans(options, _arch())
    made = iket_tool.command(target_command(options), options.out)
    if options.dry_run:
        stdout().print(str(made), markup=False)
        return
    _require(iket_tool.obstacles(), "without one: `--dry-run` prints the command")
    tools.run(made)
    written = sorted(path for path in options.out.rglob("*") if path.is_file())
    if not written:
        raise ProfilerFailed(f"{iket_tool.TOOL} left nothing in {options.out}")
    for path in written:
        stdout().print(str(path), markup=False)


@command(TargetOptions)
def target(options: TargetOptions) -> None:
    """What the profilers start: warm passes in NVTX ranges, on the GPU or the cpu backend.

    For a profiler's own options: `ncu --profile-from-start off ... hopperflash profile target ...`.
    """
    import torch

    from hopperflash.profiler import passes

    _check(options)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    schedule = passes.Schedule(_DIRECTIONS[options.direction], options.iterations, options.warm_up)
    passes.run(_attention(options, device), schedule)


app.command()(ncu)
app.command()(nsys)
app.command()(iket)
app.command()(target)


def target_command(options: TargetOptions) -> tuple[str, ...]:
    """`hopperflash profile target` with the options that are not what they are by default."""
    words = [sys.executable, "-m", "hopperflash", "profile", "target"]
    for field in dataclasses.fields(TargetOptions):
        value = getattr(options, field.name)
        name = field.name.replace("_", "-")
        if value == field.default:
            continue
        if field.name == "causal":
            words.append("--causal" if value else "--full")
        elif value is True:
            words.append(f"--{name}")
        else:
            words.append(f"--{name}={getattr(value, 'value', value)}")
    return tuple(words)


def _check(options: TargetOptions, *, emulated: bool = False, report: Path | None = None) -> None:
    """Raises `InvalidArgument` with everything that is wrong with the options."""
    reasons = []
    if options.direction not in _DIRECTIONS:
        reasons.append(f"--direction is {options.direction!r}: give forward, backward or both")
    for name, known in _CONTROLS.items():
        value = getattr(options, name, known[0])
        if value not in known:
            reasons.append(f"--{name.replace('_', '-')} is {value!r}: give {' or '.join(known)}")
    ways = {"--dry-run": getattr(options, "dry_run", False), "--emulated": emulated,
            "--report": report is not None}  # fmt: skip
    chosen = [way for way, given in ways.items() if given]
    if len(chosen) > 1:
        reasons.append(f"{' and '.join(chosen)} exclude each other: give one")
    if reasons:
        raise InvalidArgument("these options are not right:", reasons)


def _require(obstacles: Sequence[str], way_out: str) -> None:
    if obstacles:
        raise ProfilerFailed("cannot profile here:", [*obstacles, way_out])


def _ncu_command(options: NcuOptions, arch: str) -> Command:
    settings = ncu_tool.Settings(
        arch,
        options.out,
        options.all_sections,
        options.lineinfo,
        options.cache_control,
        options.clock_control,
    )
    known = ncu_tool.known_metrics(arch)
    return ncu_tool.command(target_command(options), settings, known)


def _arch(named: str | None = None, capability: tuple[int, int] = (0, 0)) -> str:
    """The compile target: as asked for, else of the GPU that a report is of, else of one here."""
    if named is not None:
        return plan.arch_of(named).name
    if capability == (0, 0):
        import torch

        if not torch.cuda.is_available():
            return "sm_90a"
        capability = torch.cuda.get_device_capability()
    return plan.arch_of_capability(capability).name


def _plans(options: TargetOptions, arch: str) -> list[plan.LaunchPlan]:
    """A plan for each pass; `UnsupportedProblem` where one launches nothing."""
    shared = {
        field.name: getattr(options, field.name) for field in dataclasses.fields(ProblemOptions)
    }
    shared |= {name: getattr(options, name) for name in ("deterministic", "backend")}
    directions = _DIRECTIONS[options.direction]
    plans = [plan_of(ExplainOptions(**shared, arch=arch, direction=way)) for way in directions]
    idle = [f"{one.direction}: {one.backend} takes it" for one in plans if not one.calls]
    if idle:
        raise UnsupportedProblem("nothing to profile: this problem launches no kernel:", idle)
    return plans


def _compared(profiles: tuple[KernelProfile, ...], options: NcuOptions) -> tuple[Comparison, ...]:
    from hopperflash.analysis.tiled_traffic import L2
    from hopperflash.profiler.comparison import of_profiles

    arch = _arch(options.arch, profiles[0].capability)
    return of_profiles(profiles, _plans(options, arch), L2.of(plan.arch_of(arch)))


def _emulated(options: NcuOptions, plans: list[plan.LaunchPlan]) -> tuple[Comparison, ...]:
    from hopperflash.profiler import passes
    from hopperflash.profiler.comparison import of_emulated
    from hopperflash.runtime.emulation import emulate

    schedule = passes.Schedule(_DIRECTIONS[options.direction], iterations=1, warm_up=0)
    with stages() as progress:
        progress.enter("executing CTAs")
        with emulate(plans[0].arch.name, hazards="basic", progress=progress.advance) as run:
            passes.run(_attention(options, "cpu"), schedule)
    shapes = {info.kernel_name: (info.grid, info.block) for info in run.launches}
    return tuple(of_emulated(run.kernels, shapes, plans))


def _show(found: tuple[Comparison, ...], options: NcuOptions) -> None:
    if options.json:
        print_json({"kernels": as_data(found)})
        return
    show_comparisons(found, stdout())
    if options.seqlens is not None:
        stderr().print("the lengths of packed sequences are values: no model of their bytes")


def _attention(options: TargetOptions, device: str) -> Attention:
    from hopperflash.cli.inputs import random_attention

    attention = random_attention(options, options.seed)
    return attention.on(device, deterministic=options.deterministic, backend=options.backend)
