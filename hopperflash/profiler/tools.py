"""NVIDIA's profilers as programs: where they are, what stands in their way, what they say."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hopperflash import env
from hopperflash.errors import HopperflashError

_PARAMETERS = Path("/proc/driver/nvidia/params")
_CAPABILITIES = Path("/proc/self/status")
_SYS_ADMIN = 1 << 21
_ROOTS = ("/usr/local/cuda*", "/opt/nvidia/nsight-*/*", "/usr/lib/nsight-*")

PERMISSION = (
    "the driver lets only administrators read the GPU's counters: run as root, in a container with"
    " --cap-add SYS_ADMIN, or have the host load the driver with"
    " NVreg_RestrictProfilingToAdminUsers=0 (a line `options nvidia"
    " NVreg_RestrictProfilingToAdminUsers=0` in /etc/modprobe.d, then a reboot)"
)
NO_KERNELS = "No kernels were profiled"
# What a profiler prints when something outside of this project has to change, and what.
ADVICE = {
    "ERR_NVGPUCTRPERM": PERMISSION,
    "NVreg_RestrictProfilingToAdminUsers": PERMISSION,
    "a driver resource was unavailable": (
        "another tool holds the GPU's counters: end it, or pause it (`dcgmi profile --pause` where"
        " DCGM watches the node)"
    ),
    "driver is not compatible with Nsight": (
        "the driver is too old for this release of the profiler: update the driver, or take the"
        " profiler of the CUDA toolkit that fits it"
    ),
    "Invalid chip": "this release of ncu is older than the GPU: take a newer one",
    "failed to connect to the CUDA driver": "the profiler finds no CUDA driver: libcuda.so.1",
    "Failed to find metric": (
        "this release of ncu has other metrics for this GPU than hopperflash/profiler/metrics.py"
        " knows: `ncu --query-metrics` lists them"
    ),
    NO_KERNELS: "no kernel of this package was launched: `hopperflash explain` names the backend",
}
# Those of them that are this project's to mend.
FAULTS = ("Failed to find metric", NO_KERNELS)
_INSTALL = {
    "ncu": "install nsight-compute (it comes with CUDA toolkits)",
    "nsys": "install nsight-systems (it comes with CUDA toolkits)",
    "run-iket": "it comes with nvidia-cutlass-dsl 4.8: `pip install nvidia-cutlass-dsl`",
}


class ProfilerFailed(HopperflashError, RuntimeError):
    """A profiler cannot run here, or ran and failed; with what to do about it."""


@dataclass(frozen=True)
class Command:
    """A process to start: its words, and the variables that it is given."""

    words: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.variables.items()]
        return " ".join([*settings, shlex.join(self.words)])


def find(tool: str) -> str | None:
    """The path of a profiler; the newest where there are several releases."""
    on_path = shutil.which(tool)
    if on_path is not None:
        return on_path
    beside = Path(sys.executable).with_name(tool)
    if beside.is_file():
        return str(beside)
    found = [path for folder in _folders() for path in _in_folder(folder, tool)]
    return str(max(found)) if found else None


def _folders() -> Iterator[Path]:
    home = env.cuda_home()
    if home is not None:
        yield home
    for pattern in _ROOTS:
        yield from Path("/").glob(pattern.removeprefix("/"))


def _in_folder(folder: Path, tool: str) -> Iterator[Path]:
    for place in ("", "bin", "target/*", "nsight-compute*", "nsight-systems*/bin"):
        yield from (path for path in folder.glob(f"{place}/{tool}".lstrip("/")) if path.is_file())


def absent(tool: str) -> str:
    """That a profiler is not here, where it was looked for, and how it gets here."""
    places = ", ".join(("PATH", "CUDA_HOME", *_ROOTS))
    return f"no {tool} in {places}: {_INSTALL[tool]}"


def obstacles(tool: str, counters: bool) -> list[str]:
    """Everything that keeps a profiler from a GPU of this machine; `counters` need a permission."""
    found = [] if find(tool) else [absent(tool)]
    gpu = _no_gpu()
    found += [gpu] if gpu else []
    watching = env.attached_profiler()
    if watching is not None:
        found.append(f"{watching} is set: a profiler watches this process; run outside of it")
    if counters and not gpu and not _may_read_counters():
        found.append(PERMISSION)
    return found


def _no_gpu() -> str:
    import torch

    if torch.cuda.is_available():
        return ""
    build = "is built without CUDA" if torch.version.cuda is None else "sees no CUDA device"
    return f"no GPU to profile: torch {build}; `hopperflash doctor` says what mends it"


def _may_read_counters() -> bool:
    """Whether the driver's restriction is off, or does not hold for this process."""
    if not _PARAMETERS.exists() or "RmProfilingAdminOnly: 1" not in _PARAMETERS.read_text():
        return True
    (effective,) = (
        line.split()[1] for line in _CAPABILITIES.read_text().splitlines() if "CapEff" in line
    )
    return bool(int(effective, 16) & _SYS_ADMIN)


def run(command: Command) -> str:
    """What a command printed, shown on stderr as it comes.

    Raises `ProfilerFailed` with its last words, and what to do where that is known.
    """
    process = subprocess.Popen(
        command.words,
        env=env.of_child(command.variables),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    lines = []
    with process:
        for line in process.stdout or ():
            sys.stderr.write(line)
            lines.append(line)
    text = "".join(lines)
    advice = advice_on(text)
    if process.returncode or NO_KERNELS in text:
        words = [line.strip() for line in lines if line.strip()][-3:]
        name = Path(command.words[0]).name
        raise ProfilerFailed(f"{name} ended with status {process.returncode}:", [*words, *advice])
    return text


def output(command: Sequence[str]) -> str:
    """What a quiet command prints; `ProfilerFailed` where it fails."""
    done = subprocess.run(
        command, env=env.of_child({"LC_ALL": "C"}), capture_output=True, text=True, check=False
    )
    if done.returncode:
        words = (done.stderr or done.stdout).strip().splitlines()[-3:]
        raise ProfilerFailed(
            f"{shlex.join(command)} ended with status {done.returncode}:",
            [*words, *advice_on(done.stdout + done.stderr)],
        )
    return done.stdout


def advice_on(text: str) -> list[str]:
    """What to do about the signs of trouble in what a profiler printed, each told once."""
    return list(dict.fromkeys(advice for sign, advice in ADVICE.items() if sign in text))
