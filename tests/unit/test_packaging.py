"""What pyproject.toml says: the packages on disk, and requirements that name what there is."""

from __future__ import annotations

import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from hopperflash.runtime import generations

ROOT = Path(__file__).parents[2]


def packages_on_disk() -> set[str]:
    """Dotted names of folders with an `__init__.py`; `kernels/` maps to `hopperflash.kernels`."""
    folders = [
        path.parent.relative_to(ROOT)
        for top in ("hopperflash", "kernels")
        for path in (ROOT / top).rglob("__init__.py")
    ]
    return {re.sub(r"^kernels", "hopperflash.kernels", ".".join(f.parts)) for f in folders}


@pytest.fixture
def pyproject() -> dict[str, Any]:
    if sys.version_info < (3, 11):
        pytest.skip("tomllib came with Python 3.11")
    import tomllib

    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_listed_packages_are_those_on_disk(pyproject):
    setuptools = pyproject["tool"]["setuptools"]
    assert sorted(setuptools["packages"]) == sorted(packages_on_disk())
    assert setuptools["package-dir"]["hopperflash.kernels"] == "kernels"


def test_every_source_file_is_in_a_package():
    for top in ("hopperflash", "kernels"):
        for path in (ROOT / top).rglob("*.py"):
            assert (path.parent / "__init__.py").exists(), path.relative_to(ROOT)


def test_the_cuda_13_extra_is_that_of_the_compiler(pyproject):
    """Same releases as without it, by the name that the compiler gives its extra."""
    named = [Requirement(text) for text in pyproject["project"]["dependencies"]]
    (plain,) = [one for one in named if one.name == "nvidia-cutlass-dsl"]
    (extra,) = [Requirement(text) for text in pyproject["project"]["optional-dependencies"]["cu13"]]
    assert (extra.name, extra.specifier) == (plain.name, plain.specifier)
    (chosen,) = extra.extras
    offered = metadata.distribution(extra.name)
    assert chosen in (offered.metadata.get_all("Provides-Extra") or ())
    brought = [
        requirement.name
        for requirement in map(Requirement, offered.requires or ())
        if requirement.marker is not None and requirement.marker.evaluate({"extra": chosen})
    ]
    assert brought == ["nvidia-cutlass-dsl-libs-cu13"]
    assert generations._RELEASES.split(",") == sorted(
        map(str, plain.specifier), key=lambda one: not one.startswith(">")
    )
