"""The shape of the source, read from its syntax trees: who imports whom, and sizes."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Floors from the ground up; a module imports from its own floor or a lower one.
FLOORS = (
    {"errors", "env"},
    {"problem"},
    {"plan", "reference", "streaming", "packed", "padding", "tolerance"},
    {"kernels", "analysis"},
    {"runtime"},
    {"calls", "ops"},
    {"api", "distributed", "fused_qkv"},
    {"bench", "profiler"},
    {"integrations", "cli", "__main__"},
)
FLOOR_OF = {part: number for number, parts in enumerate(FLOORS) for part in parts}
PURE = {"errors", "problem", "plan"}

FILE_LINES = 400
HOST_FUNCTION_LINES = 60
DEVICE_FUNCTION_LINES = 120
PARAMETERS = 8
# Where a signature is somebody else's contract, or a launch's tensors one by one, and says so to
# ruff, its length is not ours.
FREE_SIGNATURES = {"api.py", "fused_qkv.py", "hf.py"}  # and what a launch takes

SOURCES = sorted(
    path for folder in ("hopperflash", "kernels") for path in (ROOT / folder).rglob("*.py")
)


def module_of(path: Path) -> tuple[str, ...]:
    """Dotted name of a source file in parts; `kernels/` is installed as `hopperflash.kernels`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = ("hopperflash", *parts) if parts[0] == "kernels" else parts
    return parts[:-1] if parts[-1] == "__init__" else parts


def imports(path: Path) -> Iterator[tuple[str, ...]]:
    """Absolute names a file imports from this project, in parts, wherever the statement stands."""
    package = module_of(path) if path.name == "__init__.py" else module_of(path)[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [tuple(alias.name.split(".")) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            base += tuple(node.module.split(".")) if node.module else ()
            names = [(*base, alias.name) for alias in node.names]
        else:
            continue
        yield from (name for name in names if name[0] == "hopperflash")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def violations(path: Path) -> list[str]:
    """Imports of a file that point upwards or reach over a wall."""
    parts = module_of(path)
    here = parts[1] if len(parts) > 1 else None
    found = []
    for name in imports(path):
        there = name[1] if len(name) > 1 else None
        if here is None or there is None or there == here:
            continue
        if here == "emulator":
            found.append(f"the emulator stands alone, imports {'.'.join(name)}")
        elif there == "kernels":
            found.append(f"kernels are reached by KernelRef, not by importing {'.'.join(name)}")
        elif here == "kernels" and there not in PURE:
            found.append(f"kernels import pure data only, not {'.'.join(name)}")
        elif there == "emulator":
            if FLOOR_OF[here] < FLOOR_OF["runtime"]:
                found.append(f"{here} lies below the emulator's callers")
        elif there in FLOOR_OF and FLOOR_OF[here] < FLOOR_OF[there]:
            found.append(f"{here} imports upwards: {'.'.join(name)}")
    return found


def test_every_part_has_a_floor():
    parts = {module_of(path)[1] for path in SOURCES if len(module_of(path)) > 1}
    assert parts <= {*FLOOR_OF, "emulator"}


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_imports_point_down(path):
    assert violations(path) == []


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_only_env_reads_the_environment(path):
    reads = [
        node.lineno
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv"}
    ]
    assert bool(reads) == (module_of(path) == ("hopperflash", "env")), reads


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_sizes(path):
    text = path.read_text()
    assert len(text.splitlines()) < FILE_LINES
    in_kernels = path.is_relative_to(ROOT / "kernels")
    limit = DEVICE_FUNCTION_LINES if in_kernels else HOST_FUNCTION_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            docstring = len((ast.get_docstring(node, clean=False) or "").splitlines())
            lines = (node.end_lineno or node.lineno) - node.lineno + 1 - docstring
            assert lines < limit, f"{node.name} has {lines} lines"
            free = in_kernels or path.name in FREE_SIGNATURES
            if free and "PLR0913" in text.splitlines()[node.lineno - 1]:
                continue
            given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            counted = [arg.arg for arg in given if arg.arg not in {"self", "cls"}]
            assert len(counted) <= PARAMETERS, f"{node.name} has {len(counted)} parameters"


@pytest.mark.parametrize("module", ["hopperflash", "hopperflash.problem", "hopperflash.plan"])
def test_pure_packages_load_neither_torch_nor_cutlass(module):
    code = f"import sys, {module}; print(*({{'torch', 'cutlass'}} & set(sys.modules)))"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == ""
