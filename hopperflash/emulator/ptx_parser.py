"""PTX text to `Module`: its kernels, device functions and variables."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import EmulationError
from .ptx_body import BodyParser, Function
from .ptx_ir import Kernel, Module, Variable
from .ptx_variables import module_variables, parameters

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_FUNCTION = re.compile(
    r"\.(?:(?P<entry>entry)|func)\s*(?P<returns>\([^)]*\))?\s*(?P<name>[\w$]+)\s*"
    r"(?P<params>\([^)]*\))?(?P<directives>[^{;]*)(?P<end>[{;])"
)
_FILE = re.compile(r'\.file\s+(\d+)\s+"([^"]*)"')
_BRACE = re.compile(r"[{}]")
_ARRAY_ALIGNMENT = 256


def parse_module(ptx: str) -> Module:
    """Parse PTX text; kernels are decoded to code on their first launch."""
    text = _COMMENT.sub(lambda m: "\n" * m.group().count("\n"), ptx)
    target = re.search(r"\.target\s+([\w, ]+)", text)
    version = re.search(r"\.version\s+([\d.]+)", text)
    functions, entries = _functions(text)
    variables = list(_variables_between(text, [*functions.values(), *entries]))
    arrays = {v.name: _array(v) for v in variables if v.space in ("global", "const")}
    files = {int(n): name for n, name in _FILE.findall(text)}
    kernels: dict[str, Kernel] = {}
    for entry in entries:
        kernel = Kernel(entry.name, list(parameters(entry.params)))
        kernel.reqntid = _extents(entry.directives, "reqntid")
        kernel.maxnreg = (_extents(entry.directives, "maxnreg") or (0,))[0]
        kernel.minnctapersm = (_extents(entry.directives, "minnctapersm") or (0,))[0]
        kernel.cluster = _extents(entry.directives, "reqnctapercluster")
        kernel.variables = {v.name: v for v in variables}
        kernel.arrays = arrays
        BodyParser(kernel, functions, files).parse(entry)
        kernels[kernel.name] = kernel
    return Module(
        kernels,
        target.group(1).strip() if target else "",
        version.group(1) if version else "",
    )


def _functions(text: str) -> tuple[dict[str, Function], list[Function]]:
    """Device functions by name, and kernel entries in order; declarations have no body."""
    functions: dict[str, Function] = {}
    entries: list[Function] = []
    position = 0
    while match := _FUNCTION.search(text, position):
        position = match.end()
        body, line = None, text.count("\n", 0, match.end()) + 1
        if match["end"] == "{":
            end = _matching_brace(text, match.end() - 1)
            body, position = text[match.end() : end], end + 1
        found = Function(
            name=match["name"], returns=match["returns"] or "", params=match["params"] or "",
            directives=match["directives"], body=body, line=line, span=(match.start(), position),
        )  # fmt: skip
        if match["entry"]:
            entries.append(found)
        elif body is not None or found.name not in functions:
            functions[found.name] = found
    return functions, entries


def _variables_between(text: str, functions: list[Function]) -> Iterator[Variable]:
    position = 0
    for start, end in sorted(function.span for function in functions):
        yield from module_variables(text[position:start])
        position = end
    yield from module_variables(text[position:])


def _array(variable: Variable) -> NDArray[np.uint8]:
    """Memory of a module variable: one for all kernels of the module, kept between launches."""
    raw = np.zeros(variable.size + _ARRAY_ALIGNMENT, np.uint8)
    start = -int(raw.ctypes.data) % _ARRAY_ALIGNMENT
    array = raw[start : start + variable.size]
    array[: len(variable.initial)] = np.frombuffer(variable.initial, np.uint8)
    return array


def _matching_brace(text: str, start: int) -> int:
    depth = 0
    for match in _BRACE.finditer(text, start):
        depth += 1 if match.group() == "{" else -1
        if depth == 0:
            return match.start()
    raise EmulationError("unbalanced braces in the PTX text")


def _extents(directives: str, name: str) -> Any:
    found = re.search(rf"\.{name}\s+([\d,\s]+)", directives)
    if found is None:
        return None
    sizes = [int(v) for v in found.group(1).split(",") if v.strip()]
    return (*sizes, 1, 1)[:3]
