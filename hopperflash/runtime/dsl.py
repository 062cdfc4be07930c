"""The compiler's libraries and the driver, found without importing the compiler."""

from __future__ import annotations

import ctypes
import importlib.util
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from hopperflash.errors import CompileError
from hopperflash.runtime.generations import chosen_generation, judge

_LIBRARY = "libcute_dsl_runtime.so"


class DslRuntime(NamedTuple):
    """The library that compiled host code calls the CUDA runtime through."""

    cuda_major: int
    """The CUDA generation it and the compiler's code generator are built for."""
    path: Path


@lru_cache(maxsize=1)
def dsl_runtime() -> DslRuntime:
    """The one the compiler would choose: the newest generation installed that the driver supports,
    or the newest where there is no driver.

    Raises `CompileError`, with the command that mends it, where none is installed for the driver.
    """
    found, driver = installed_libraries(), driver_version()
    chosen = chosen_generation(found, driver[0] if driver else None)
    if chosen is None:
        findings = judge(frozenset(found), None, driver, dsl_release())
        reasons = [
            ": ".join(filter(None, (finding.text, finding.mend)))
            for finding in findings
            if finding.breaks == "compiler"
        ]
        raise CompileError("nvidia-cutlass-dsl has no libraries for this machine:", reasons)
    return DslRuntime(chosen, found[chosen])


def installed_libraries() -> dict[int, Path]:
    """The compiler's runtime libraries by CUDA generation: those beside it, which it looks for."""
    spec = importlib.util.find_spec("nvidia_cutlass_dsl")
    roots = [Path(root) for root in (spec.submodule_search_locations or ())] if spec else []
    return {
        int(path.parent.parent.name.removeprefix("cu")): path
        for root in [root for root in roots if (root / "dsl_packages").is_dir()][:1]
        for path in root.glob(f"cu[0-9]*/lib/{_LIBRARY}")
    }


def dsl_release() -> str | None:
    """The version of nvidia-cutlass-dsl; None where it is not installed."""
    try:
        return metadata.version("nvidia-cutlass-dsl")
    except metadata.PackageNotFoundError:
        return None


def driver_version() -> tuple[int, int] | None:
    """The newest CUDA version that the driver supports; None without a driver."""
    version = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return None if failed else (version.value // 1000, version.value % 1000 // 10)
