"""Whether the CUDA generations of the compiler's libraries, of torch and of the driver fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

# What the libraries of nvidia-cutlass-dsl 4.8.1 are built with, by their own version strings, and
# NVIDIA's least driver for that, which it asks for of the compiler.
TOOLKITS = {12: ((12, 9), "575.51"), 13: ((13, 4), "")}
# The first drivers of each generation.
DRIVERS = {12: "525.60", 13: "580.65"}
_OLDEST, _NEWEST = min(DRIVERS), max(DRIVERS)
_RELEASES = ">=4.8.1,<4.9"
# What PyTorch's index calls its builds for a generation.
_TORCH_BUILDS = {12: "cu126", 13: "cu130"}
_TORCH_INDEX = "; PYTORCH_INDEX is the index that PyTorch's installation page names"


@dataclass(frozen=True)
class Finding:
    """Something that does not fit, and the command that mends it, "" where no pip command does.

    `breaks` is "compiler" where nothing compiles, "gpu" where no GPU is used, "" for an advice.
    """

    breaks: str
    text: str
    mend: str = ""


def chosen_generation(dsl: Iterable[int], driver: int | None) -> int | None:
    """The generation that the compiler takes: the newest installed that the driver supports, or the
    newest without a driver; None where it refuses to be imported."""
    able = [generation for generation in dsl if driver is None or generation <= driver]
    return max(able, default=None)


def judge(
    dsl: frozenset[int], torch: int | None, driver: tuple[int, int] | None, release: str | None
) -> tuple[Finding, ...]:
    """Everything that does not fit.

    Args:
        dsl: generations whose libraries are installed, such as {12}.
        torch: the generation that torch is built for; None for a build without CUDA.
        driver: the newest CUDA version that the driver supports; None without a driver.
        release: of nvidia-cutlass-dsl, for the commands; None where it is not installed.
    """
    major = None if driver is None else driver[0]
    return (
        *_of_compiler(dsl, torch, major, release),
        *_of_torch(torch, major),
        *_of_both(dsl, torch, major, release),
        *_of_toolkit(dsl, driver),
    )


def _of_compiler(
    dsl: frozenset[int], torch: int | None, driver: int | None, release: str | None
) -> Iterator[Finding]:
    """Why the compiler cannot be imported."""
    if chosen_generation(dsl, driver) is not None:
        return
    if driver is not None and driver < _OLDEST:
        yield Finding(
            "compiler",
            f"the driver supports CUDA {driver}, and nvidia-cutlass-dsl has libraries from CUDA"
            f" {_OLDEST} on: update the driver to {DRIVERS[_OLDEST]} or newer",
        )
        return
    able = _NEWEST if driver is None else min(driver, _NEWEST)
    wanted = torch if torch in DRIVERS and torch <= able else min(able, _OLDEST)
    why = "nvidia-cutlass-dsl has no libraries installed"
    if dsl:
        why = (
            f"the driver supports CUDA {driver}, nvidia-cutlass-dsl's libraries are for CUDA"
            f" {_listed(dsl)} only"
        )
    yield Finding("compiler", why, _install(wanted, release))


def _of_torch(torch: int | None, driver: int | None) -> Iterator[Finding]:
    """Why torch uses no GPU of this driver."""
    if driver is None or driver < _OLDEST:
        return
    build = min(driver, _NEWEST)
    index = f"$PYTORCH_INDEX/{_TORCH_BUILDS[build]}"
    command = f"pip install --force-reinstall torch --index-url {index}"
    if torch is None:
        without = f"torch is built without CUDA and sees no GPU{_TORCH_INDEX}"
        yield Finding("gpu", without, command)
    elif torch > driver:
        newer = f" ({DRIVERS[torch]} or newer)" if torch in DRIVERS else ""
        yield Finding(
            "gpu",
            f"torch is built for CUDA {torch}, the driver supports CUDA {driver}: update the"
            f" driver{newer}, or take a torch for CUDA {build}{_TORCH_INDEX}",
            command,
        )


def _of_both(
    dsl: frozenset[int], torch: int | None, driver: int | None, release: str | None
) -> Iterator[Finding]:
    """Compiler and torch of two generations. Each brings a CUDA runtime of its own, the compiler's
    linked into its library, and runtimes share the driver's context of a device: that is how CUDA
    is documented. It is not tested here."""
    chosen = chosen_generation(dsl, driver)
    if chosen is None or torch is None or torch == chosen:
        return
    if driver is not None and torch > driver:
        return  # it is torch that does not fit
    if chosen < torch:
        mend = f"pip install 'hopperflash[cu{torch}]'"
    else:
        mend = f"pip uninstall nvidia-cutlass-dsl-libs-cu{chosen}"
        if torch not in dsl:
            mend = f"{_install(torch, release)} && {mend}"
    yield Finding(
        "",
        f"kernels are compiled with CUDA {chosen}, torch is built for CUDA {torch}: two CUDA"
        " runtimes share a process, which CUDA allows and this package has not tested; one"
        " generation is advised",
        mend,
    )


def _of_toolkit(dsl: frozenset[int], driver: tuple[int, int] | None) -> Iterator[Finding]:
    """A driver of the right generation that is older than the compiler's CUDA."""
    if driver is None:
        return
    chosen = chosen_generation(dsl, driver[0])
    if chosen not in TOOLKITS or driver >= TOOLKITS[chosen][0]:
        return
    toolkit, asked = TOOLKITS[chosen]
    newer = f" to {asked} or newer, as NVIDIA asks," if asked else ""
    yield Finding(
        "",
        f"the driver supports CUDA {_version(driver)}, the compiler is of CUDA {_version(toolkit)}:"
        f" binaries run on every driver of their generation; update it{newer} if one does not load",
    )


def _install(generation: int, release: str | None) -> str:
    """What brings the libraries of a generation, also where their files were lost."""
    if release is None:
        extra = "[cu13]" if generation == 13 else ""
        return f"pip install 'nvidia-cutlass-dsl{extra}{_RELEASES}'"
    wheel = f"nvidia-cutlass-dsl-libs-cu{generation}=={release}"
    return f"pip install --force-reinstall --no-deps {wheel}"


def _listed(generations: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(generations)))


def _version(version: tuple[int, int]) -> str:
    return "{}.{}".format(*version)
