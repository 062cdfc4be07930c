"""The packages that the wheel is told of are those on disk."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def packages_on_disk() -> set[str]:
    """Dotted names of folders with an `__init__.py`; `kernels/` maps to `hopperflash.kernels`."""
    folders = [
        path.parent.relative_to(ROOT)
        for top in ("hopperflash", "kernels")
        for path in (ROOT / top).rglob("__init__.py")
    ]
    return {re.sub(r"^kernels", "hopperflash.kernels", ".".join(f.parts)) for f in folders}


def test_listed_packages_are_those_on_disk():
    if sys.version_info < (3, 11):
        pytest.skip("tomllib came with Python 3.11")
    import tomllib

    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert sorted(setuptools["packages"]) == sorted(packages_on_disk())
    assert setuptools["package-dir"]["hopperflash.kernels"] == "kernels"


def test_every_source_file_is_in_a_package():
    for top in ("hopperflash", "kernels"):
        for path in (ROOT / top).rglob("*.py"):
            assert (path.parent / "__init__.py").exists(), path.relative_to(ROOT)
