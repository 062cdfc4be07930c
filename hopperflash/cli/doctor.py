"""`hopperflash doctor`: all that a report of a fault needs, and what works on this machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import typer
from rich.console import Console

from hopperflash.cli.diagnosis import CacheState, Diagnosis, diagnose
from hopperflash.cli.options import command, flag
from hopperflash.cli.output import WRONG, print_json, stages, stderr, stdout
from hopperflash.cli.requirements import NEEDED, PEERS

LABEL_WIDTH = 30
ANSWERS = {True: "yes", False: "no", None: "not tried"}
NO_NVDISASM = (
    "missing: `hopperflash compile` needs it; it comes with the extras `profiling` and `test`, or"
    " by `pip install nvidia-cuda-nvdisasm`"
)
MIB, GIB = 1 << 20, 1 << 30

Line = Callable[[str, str], None]


@dataclass(frozen=True)
class DoctorOptions:
    """What `hopperflash doctor` takes."""

    quick: Annotated[bool, flag("Compile and compute nothing.", "--quick")] = False
    json: Annotated[bool, flag("Print one JSON document.", "--json")] = False


@command(DoctorOptions)
def doctor(options: DoctorOptions) -> None:
    """Print versions, GPUs, CUDA generations, the cache, and what works here and what does not.

    Compiles a small kernel, executes it in the emulator, and computes on the CPU and every GPU,
    unless --quick. Exits 1 if something does not work that should here.
    """
    with stages() as progress:
        found = diagnose(progress, tried=not options.quick)
    if options.json:
        print_json(found)
    else:
        show(found, stdout())
    for failure in found.failures:
        stderr().print(f"WRONG: {failure.name}: {failure.detail}", markup=False)
    if found.failures:
        raise typer.Exit(WRONG)


def show(found: Diagnosis, console: Console) -> None:
    """One labelled line per fact."""

    def line(label: str, text: str) -> None:
        console.print(f"{label:<{LABEL_WIDTH}}{text}", markup=False)

    line("python", f"{found.python} ({found.executable})")
    line("platform", f"{found.platform}, {found.cpus} CPUs")
    for name in (*NEEDED, *PEERS):
        version = found.versions[name]
        if version or name in NEEDED:
            line(name, version or "not installed")
    line("nvdisasm", found.nvdisasm or NO_NVDISASM)
    for requirement in found.unmet_requirements:
        line("requirement not met", requirement)
    _show_cuda(found, line)
    _show_cache(found.cache, line)
    for name, value in found.variables.items():
        unread = " (nothing reads it)" if name in found.unknown_variables else ""
        line(name, f"{value}{unread}")
    console.print()
    for ability in found.abilities:
        line(ability.name, f"{ANSWERS[ability.ok]}: {ability.detail}")


def _show_cuda(found: Diagnosis, line: Line) -> None:
    cuda = found.cuda
    release = f" ({cuda.driver_release})" if cuda.driver_release else ""
    line("driver", f"CUDA {cuda.driver}{release}" if cuda.driver else "none")
    line("torch's CUDA", cuda.torch or "none")
    libraries = ", ".join(map(str, cuda.installed)) or "none"
    line("compiler's CUDA", f"{cuda.compiler or 'none'}, of {libraries} installed")
    for finding in cuda.findings:
        breaks = finding.breaks == "compiler" or (finding.breaks and found.gpus)
        line("CUDA does not fit" if breaks else "CUDA advice", finding.text)
        if finding.mend:
            line("", finding.mend)
    line("GPUs", str(len(found.gpus)) if found.gpus else "none: kernels run in the emulator")
    for gpu in found.gpus:
        capability = "{}.{}".format(*gpu.capability)
        taken = f"{gpu.backend} backend for {gpu.arch}" if gpu.arch else "no backend"
        line(
            gpu.device,
            f"{gpu.name}, compute capability {capability}, {gpu.multiprocessors} SMs,"
            f" {gpu.memory_bytes / GIB:.1f} GiB, {taken}",
        )


def _show_cache(cache: CacheState, line: Line) -> None:
    size = f"{cache.bytes / MIB:.1f} MiB of {cache.limit_bytes // MIB} MiB"
    state = "" if cache.enabled else ", switched off"
    line("cache", f"{cache.folder}: {cache.entries} kernels, {size}{state}")
    if cache.seed is not None:
        line("cache seed", f"{cache.seed}: {cache.seed_entries} kernels")
    for trouble in cache.trouble:
        line("cache trouble", trouble)
