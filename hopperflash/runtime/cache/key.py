"""What a cached kernel depends on: its specification, and the installation that compiled it."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import platform
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path

import hopperflash
from hopperflash import env
from hopperflash.plan import KernelSpec
from hopperflash.runtime.dsl import dsl_runtime

FORMAT = "1"
"""Of the files; another number, another key."""

# What device code is made of, and what turns it into a binary.
_SOURCES = ("kernels", "plan", "problem", "runtime/compile.py", "emulator/host_export.py")
_DIGITS = 32  # of 64: 128 bits


@dataclass(frozen=True)
class CacheKey:
    """`spec` and `installation` as text: what is hashed, stored beside the kernel and compared."""

    name: str
    """The kernel's class and target, for people."""
    spec: str
    installation: tuple[tuple[str, str], ...]

    @property
    def kernel_id(self) -> str:
        """Of the specification, whatever the installation."""
        return _digest(self.spec)

    @property
    def file_name(self) -> str:
        """Of the cache entry."""
        return f"{self.name}-{self.kernel_id}-{_digest(json.dumps(self.installation))}.kernel"

    def differences(self, other: CacheKey) -> list[str]:
        """What of the installation is new since `other`."""
        before = dict(other.installation)
        return [
            f"{part} was {before.get(part, 'nothing')}, is {value}"
            for part, value in self.installation
            if before.get(part) != value
        ]


def key_of(spec: KernelSpec) -> CacheKey:
    """The key of a kernel in this installation; neither tensors nor lengths are in a spec."""
    parts = installation()
    if not spec.ref.module.startswith("hopperflash."):
        parts = (*parts, ("module", _digest_of_module(spec.ref.module)))
    return CacheKey(f"{spec.ref.name}-{spec.target}", repr(spec), parts)


@lru_cache(maxsize=1)
def installation() -> tuple[tuple[str, str], ...]:
    """Sources, versions and settings; read once, since imported sources stay as they are."""
    cuda = f"cu{dsl_runtime().cuda_major}"
    settings = " ".join(f"{name}={value}" for name, value in env.compiler_settings())
    return (
        ("format", FORMAT),
        ("sources", source_digest()),
        ("nvidia-cutlass-dsl", metadata.version("nvidia-cutlass-dsl")),
        ("cuda", f"{cuda} {metadata.version(f'nvidia-cutlass-dsl-libs-{cuda}')}"),
        ("apache-tvm-ffi", metadata.version("apache-tvm-ffi")),
        ("python", ".".join(platform.python_version_tuple()[:2])),
        ("machine", platform.machine()),
        ("settings", settings or "none"),
    )


def source_digest() -> str:
    """Of the files that device code is made from, by their content and place in the package."""
    root = Path(hopperflash.__file__).parent
    found = []
    for source in _SOURCES:
        path = root / source
        if source == "kernels" and not path.exists():
            path = root.parent / source  # a checkout
        files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
        found += [(f"{source}/{file.relative_to(path)}", file) for file in files]
    digest = hashlib.sha256()
    for name, file in found:
        digest.update(f"{name}\0{hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()[:_DIGITS]


def _digest_of_module(module: str) -> str:
    spec = importlib.util.find_spec(module)
    origin = spec.origin if spec is not None else None
    return hashlib.sha256(Path(origin).read_bytes()).hexdigest()[:_DIGITS] if origin else "none"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]
