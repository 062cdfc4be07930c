"""Declarations in PTX text: parameters, and variables with their initial values."""

from __future__ import annotations

import re
from collections.abc import Iterator

from .errors import UnknownInstruction
from .ptx_ir import Param, Variable

VARIABLE = re.compile(
    r"\.(shared|local|global|const)\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)\s*"
    r"((?:\[\s*\d*\s*\])*)\s*(?:=\s*(.*))?$",
    re.S,
)
_PARAM = re.compile(
    r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(?:\.ptr(?:\s*\.\w+)*(?:\s*\d+)?\s+)?"
    r"([\w$]+)\s*(?:\[(\d+)\])?"
)
_VALUE = re.compile(r"[\w.+-]+")
_FLOAT_VALUE = re.compile(r"0[fFdD]([0-9a-fA-F]+)$")
_SIZE = {"8": 1, "16": 2, "32": 4, "64": 8}


def _type_size(name: str) -> int:
    return _SIZE[name.lstrip("busf")]


def _align_up(value: int, align: int) -> int:
    return (value + align - 1) // align * align


def parameters(text: str) -> Iterator[Param]:
    """The `.param` declarations in a list, at their offsets from its start."""
    offset = 0
    for match in _PARAM.finditer(text):
        align, kind, name, count = match.groups()
        size = _type_size(kind) * int(count or 1)
        alignment = int(align or _type_size(kind))
        offset = _align_up(offset, alignment)
        yield Param(name, size, alignment, offset)
        offset += size


def module_variables(text: str) -> Iterator[Variable]:
    """Variables declared outside of any function."""
    for statement in text.split(";"):
        start = re.search(r"\.(shared|global|const)\b", statement)
        if start and (match := VARIABLE.match(statement[start.start() :].strip())):
            yield variable(match)


def variable(match: re.Match[str]) -> Variable:
    """The variable of a `VARIABLE` match."""
    space, align, kind, name, dims, init = match.groups()
    size = _type_size(kind)
    count = 1
    for dim in re.findall(r"\[\s*(\d*)\s*\]", dims or ""):
        count *= int(dim) if dim else 0
    initial = b"".join(_value(v, size, name) for v in _VALUE.findall(init or ""))
    return Variable(name, space, count * size, int(align or size), initial)


def _value(text: str, size: int, name: str) -> bytes:
    if match := _FLOAT_VALUE.match(text):
        return int(match[1], 16).to_bytes(size, "little")
    try:
        number = int(text.rstrip("U"), 0)
    except ValueError:
        raise UnknownInstruction(
            f"variable {name}: initial value {text!r} is not a literal; only those are emulated"
        ) from None
    return (number % (1 << 8 * size)).to_bytes(size, "little")
