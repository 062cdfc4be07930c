"""The only reader of environment variables; docs/cache.md describes them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from hopperflash.errors import InvalidArgument

CACHE = "HOPPERFLASH_CACHE"
CACHE_DIR = "HOPPERFLASH_CACHE_DIR"
CACHE_SEED = "HOPPERFLASH_CACHE_SEED"
CACHE_SIZE = "HOPPERFLASH_CACHE_SIZE"
LOG = "HOPPERFLASH_LOG"
LINE_INFO = "CUTE_DSL_LINEINFO"  # the compiler's own
FLASH_ATTENTION_DETERMINISTIC = "FLASH_ATTENTION_DETERMINISTIC"  # transformers' own
VARIABLES = (CACHE, CACHE_DIR, CACHE_SEED, CACHE_SIZE, LOG)

_SWITCHES = {"1": True, "on": True, "true": True, "0": False, "off": False, "false": False}
_LEVELS = ("debug", "info", "warning", "error")
# Those of the compiler's own variables that change what it generates.
_COMPILER = (
    "CUTE_DSL_AUTO_M2S",
    "CUTE_DSL_COMPILER_BACKEND",
    "CUTE_DSL_COMPILER_OPT",
    "CUTE_DSL_DEBUG",
    "CUTE_DSL_ENABLE_ASSERTIONS",
    "CUTE_DSL_ENABLE_PYIR",
    LINE_INFO,
    "CUTE_DSL_LOC_TRACEBACKS",
    "CUTE_DSL_TOLERATE_M2M",
)

# What Nsight Systems, Nsight Compute and tools like them set in the processes that they start.
_PROFILERS = (
    "NSYS_PROFILING_SESSION_ID",
    "NV_NSIGHT_INJECTION_TRANSPORT_TYPE",
    "CUDA_INJECTION64_PATH",
)


def cache_enabled() -> bool:
    """Whether kernels are kept on disk; `InvalidArgument` for what is no switch."""
    text = os.environ.get(CACHE, "1").lower()
    if text not in _SWITCHES:
        raise InvalidArgument(f"{CACHE} is {text!r}: give one of {', '.join(_SWITCHES)}")
    return _SWITCHES[text]


def cache_dir() -> Path | None:
    """Where the user wants the cache, if somewhere in particular."""
    return _path(CACHE_DIR)


def cache_seed() -> Path | None:
    """A folder of kernels that is read and never written to."""
    return _path(CACHE_SEED)


def cache_bytes(default_mib: int) -> int:
    """How large the cache may grow; `InvalidArgument` for what is no number of MiB."""
    text = os.environ.get(CACHE_SIZE) or str(default_mib)
    if not text.isdecimal():
        raise InvalidArgument(f"{CACHE_SIZE} is {text!r}: give a number of MiB such as 1024")
    return int(text) << 20


def log_level() -> str | None:
    """The level, in capitals, from which on messages are printed; None where unset."""
    text = os.environ.get(LOG, "").lower()
    if text and text not in _LEVELS:
        raise InvalidArgument(f"{LOG} is {text!r}: give one of {', '.join(_LEVELS)}")
    return text.upper() or None


def relevant() -> dict[str, str]:
    """The variables that are set of this package, of the compiler, of TVM-FFI and of CUDA."""
    prefixes = ("HOPPERFLASH_", "CUTE_DSL_", "TVM_FFI_", "CUDA_")
    return {name: os.environ[name] for name in sorted(os.environ) if name.startswith(prefixes)}


def unknown() -> list[str]:
    """Variables that are spelt like this package's and that nothing reads."""
    return [name for name in relevant() if name.startswith("HOPPERFLASH") and name not in VARIABLES]


def flash_attention_deterministic() -> bool:
    """Whether transformers was told to have deterministic flash attention."""
    return os.environ.get(FLASH_ATTENTION_DETERMINISTIC, "0") == "1"


def compiler_settings() -> tuple[tuple[str, str], ...]:
    """Names and values of the variables that change what the compiler generates."""
    return tuple((name, os.environ[name]) for name in _COMPILER if os.environ.get(name))


def of_child(settings: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that is started from here, with some variables set anew."""
    return {**os.environ, **settings}


def cuda_home() -> Path | None:
    """Where the user has a CUDA toolkit."""
    return _path("CUDA_HOME") or _path("CUDA_PATH")


def attached_profiler() -> str | None:
    """The variable that shows that a profiler watches this process and those it starts."""
    return next((name for name in _PROFILERS if os.environ.get(name)), None)


def _path(name: str) -> Path | None:
    text = os.environ.get(name)
    return Path(text).expanduser() if text else None
