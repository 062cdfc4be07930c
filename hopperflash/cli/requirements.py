"""Versions of what is installed, and requirements that they do not meet."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib import metadata

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

# What the package is made of, and what decides how it is compiled and launched.
NEEDED = (
    "hopperflash",
    "torch",
    "nvidia-cutlass-dsl",
    "nvidia-cutlass-dsl-libs-base",
    "nvidia-cutlass-dsl-libs-core",
    "nvidia-cutlass-dsl-libs-cu12",
    "nvidia-cutlass-dsl-libs-cu13",
    "cuda-python",
    "cuda-bindings",
    "apache-tvm-ffi",
    "apache-tvm-ffi-orcjit",
    "numpy",
    "filelock",
)
# What a report may be about too.
PEERS = ("flash-attn", "flash-attn-4", "transformers", "triton")


def versions(names: Iterable[str]) -> dict[str, str | None]:
    """The installed version of each distribution; None where it is not installed."""
    return {name: _version(name) for name in names}


def unmet(roots: Iterable[str]) -> list[str]:
    """Requirements that are not met, of the distributions named and of what these require."""
    found: dict[str, None] = {}
    waiting = [(canonicalize_name(name), "") for name in roots if _version(name) is not None]
    seen = set(waiting)
    while waiting:
        name, extra = waiting.pop()
        for requirement in _requirements(name, extra):
            version = _version(requirement.name)
            if version is None or not requirement.specifier.contains(version, prereleases=True):
                has = "is not installed" if version is None else f"is {version}"
                wanted = f"{requirement.name}{requirement.specifier}"
                found[f"{name} requires {wanted}: {requirement.name} {has}"] = None
            if version is not None:
                needed = canonicalize_name(requirement.name)
                more = [(needed, part) for part in ("", *requirement.extras)]
                waiting += [item for item in more if item not in seen]
                seen.update(more)
    return list(found)


def _requirements(name: str, extra: str) -> Iterator[Requirement]:
    """What a distribution requires here: always, or for one of its extras."""
    for text in metadata.requires(name) or ():
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        marker = requirement.marker
        applies = always = marker is None or marker.evaluate({"extra": ""})
        if extra:
            applies = marker is not None and not always and marker.evaluate({"extra": extra})
        if applies:
            yield requirement


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
