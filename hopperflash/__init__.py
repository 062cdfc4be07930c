"""Exact attention for NVIDIA Hopper, compiled from CuTe DSL and executable on any CPU."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hopperflash import analysis, emulator
    from hopperflash.api import (
        explain,
        flash_attn_backward,
        flash_attn_func,
        flash_attn_varlen_func,
        make_plan,
        supports,
    )
    from hopperflash.errors import InvalidArgument, UnsupportedProblem
    from hopperflash.fused_qkv import (
        flash_attn_kvpacked_func,
        flash_attn_qkvpacked_func,
        flash_attn_varlen_kvpacked_func,
        flash_attn_varlen_qkvpacked_func,
    )
    from hopperflash.padding import pad_input, unpad_input
    from hopperflash.runtime.emulation import emulate
    from hopperflash.runtime.preference import use_backend

__version__ = "0.1.0"

__all__ = [
    "InvalidArgument",
    "UnsupportedProblem",
    "__version__",
    "analysis",
    "emulate",
    "emulator",
    "explain",
    "flash_attn_backward",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "make_plan",
    "pad_input",
    "supports",
    "unpad_input",
    "use_backend",
]

_HOMES = {
    "InvalidArgument": "errors",
    "UnsupportedProblem": "errors",
    "emulate": "runtime.emulation",
    "explain": "api",
    "flash_attn_backward": "api",
    "flash_attn_func": "api",
    "flash_attn_kvpacked_func": "fused_qkv",
    "flash_attn_qkvpacked_func": "fused_qkv",
    "flash_attn_varlen_func": "api",
    "flash_attn_varlen_kvpacked_func": "fused_qkv",
    "flash_attn_varlen_qkvpacked_func": "fused_qkv",
    "make_plan": "api",
    "pad_input": "padding",
    "supports": "api",
    "unpad_input": "padding",
    "use_backend": "runtime.preference",
}
_SUBPACKAGES = {"analysis", "emulator"}


def _link_checkout() -> None:
    """Make `hopperflash.kernels` importable from an uninstalled checkout, where it lies outside."""
    package = Path(__file__).parent
    kernels = package.parent / "kernels" / "__init__.py"
    name = f"{__name__}.kernels"
    if name in sys.modules or (package / "kernels").exists() or not kernels.exists():
        return
    spec = importlib.util.spec_from_file_location(
        name, kernels, submodule_search_locations=[str(kernels.parent)]
    )
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)


_link_checkout()


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    """Import public names on first use, so that planning loads neither torch nor cutlass."""
    if name in _SUBPACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value
