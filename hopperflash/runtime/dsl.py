"""The compiler's libraries, found without importing the compiler."""

from __future__ import annotations

import ctypes
import importlib.util
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from hopperflash.errors import CompileError

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

    Raises `CompileError` where none is installed.
    """
    spec = importlib.util.find_spec("nvidia_cutlass_dsl")
    roots = [Path(root) for root in (spec.submodule_search_locations or ())] if spec else []
    found = {
        int(path.parent.parent.name.removeprefix("cu")): path
        for root in roots
        for path in root.glob(f"cu[0-9]*/lib/{_LIBRARY}")
    }
    driver = _driver_major()
    able = [major for major in found if driver is None or major <= driver]
    if not able:
        installed = ", ".join(f"cu{major}" for major in sorted(found)) or "none"
        raise CompileError(
            "nvidia-cutlass-dsl has no libraries for this machine:",
            [f"installed for {installed}; the driver supports CUDA {driver or 'of any version'}"],
        )
    return DslRuntime(max(able), found[max(able)])


def _driver_major() -> int | None:
    version = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return None if failed else version.value // 1000
