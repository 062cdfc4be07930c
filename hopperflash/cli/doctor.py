"""`hopperflash doctor`: versions, devices, and what works on this machine."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from importlib import import_module, metadata
from typing import Annotated, get_args

import typer
from rich.console import Console

from hopperflash import plan
from hopperflash.cli.options import command, flag
from hopperflash.cli.output import WRONG, print_json, stages, stdout
from hopperflash.errors import InvalidArgument, UnsupportedProblem
from hopperflash.problem import AttnOptions, Direction, OperandFacts, build_problem

DISTRIBUTIONS = (
    "hopperflash",
    "torch",
    "nvidia-cutlass-dsl",
    "apache-tvm-ffi",
    "cuda-python",
    "numpy",
)
LABEL_WIDTH = 28


@dataclass(frozen=True)
class Ability:
    """Something the package does; `detail` is how, or why not."""

    name: str
    ok: bool
    detail: str


@dataclass(frozen=True)
class Gpu:
    """A visible CUDA device."""

    name: str
    capability: tuple[int, int]


@dataclass(frozen=True)
class Diagnosis:
    """What was found on this machine; no version where a distribution is not installed."""

    python: str
    platform: str
    versions: dict[str, str | None]
    driver: str
    gpus: tuple[Gpu, ...]
    abilities: tuple[Ability, ...]


@dataclass(frozen=True)
class DoctorOptions:
    """What `hopperflash doctor` takes."""

    json: Annotated[bool, flag("Print one JSON document.", "--json")] = False


@command(DoctorOptions)
def doctor(options: DoctorOptions) -> None:
    """Print versions, GPUs, driver, and what works here and what does not.

    Exits 1 if kernels can be neither compiled nor executed here.
    """
    with stages() as progress:
        progress.enter("looking around")
        found = diagnose()
    if options.json:
        print_json(found)
    else:
        show(found, stdout())
    if not found.abilities[0].ok:
        raise typer.Exit(WRONG)


def diagnose() -> Diagnosis:
    """Imports torch and the compiler; allocates nothing on a GPU."""
    gpus = _gpus()
    return Diagnosis(
        python=platform.python_version(),
        platform=platform.platform(),
        versions={name: _version(name) for name in DISTRIBUTIONS},
        driver=_driver(),
        gpus=gpus,
        abilities=(_compiler(), *_computations(gpus)),
    )


def show(found: Diagnosis, console: Console) -> None:
    """One labelled line per fact."""

    def line(label: str, text: str) -> None:
        console.print(f"{label:<{LABEL_WIDTH}}{text}", markup=False)

    line("python", f"{found.python} on {found.platform}")
    for name, version in found.versions.items():
        line(name, version or "not installed")
    line("driver", found.driver)
    line("GPUs", str(len(found.gpus)) if found.gpus else "none: kernels run in the emulator")
    for gpu in found.gpus:
        line("", f"{gpu.name}, compute capability {'{}.{}'.format(*gpu.capability)}")
    console.print()
    for ability in found.abilities:
        line(ability.name, f"{'yes' if ability.ok else 'no'}: {ability.detail}")


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _gpus() -> tuple[Gpu, ...]:
    try:
        import torch
    except (ImportError, OSError):
        return ()
    return tuple(
        Gpu(torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index))
        for index in range(torch.cuda.device_count())
    )


def _driver() -> str:
    """The CUDA version the driver supports, or why it does not say."""
    try:
        from cuda.bindings import driver

        error, version = driver.cuDriverGetVersion()
    except (ImportError, RuntimeError) as missing:
        return f"none ({missing})"
    if int(error) or not version:
        return f"none ({error.name})"
    return f"CUDA {version // 1000}.{version % 1000 // 10}"


def _compiler() -> Ability:
    name = "compile and emulate sm_90a"
    try:
        for module in ("torch", "cutlass.cute", "tvm_ffi"):
            import_module(module)
    except Exception as broken:
        return Ability(name, False, f"{type(broken).__name__}: {broken}")
    return Ability(name, True, "torch, CuTe DSL and TVM-FFI import; no GPU needed")


def _computations(gpus: tuple[Gpu, ...]) -> list[Ability]:
    """What the backends say of an ordinary problem: CPU tensors, the emulator, every GPU."""
    abilities = [*_on("cpu tensors", "cpu", "cpu"), *_on("emulated sm_90a", "sm_90a", "cpu")]
    for index, gpu in enumerate(gpus):
        device = f"cuda:{index}"
        try:
            arch = plan.arch_of_capability(gpu.capability)
        except InvalidArgument as unknown:
            abilities.append(Ability(device, False, unknown.headline))
            continue
        abilities += _on(device, arch.name, device)
    return abilities


def _on(where: str, arch: str, device: str) -> list[Ability]:
    """Forward and backward of bf16 causal attention at head_dim 128."""
    operand = OperandFacts((1, 128, 1, 128), (16384, 128, 128, 1), 128, "bfloat16", device)
    problem = build_problem(operand, operand, operand, AttnOptions(causal=True))
    abilities = []
    for direction in get_args(Direction):
        try:
            taken = plan.make_plan(problem, plan.arch_of(arch), direction)
        except UnsupportedProblem as refused:
            answer = Ability(f"{direction}, {where}", False, "; ".join(refused.reasons))
        else:
            answer = Ability(f"{direction}, {where}", True, f"{taken.backend} backend")
        abilities.append(answer)
    return abilities
