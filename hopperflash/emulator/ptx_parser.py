"""PTX text to `Module`: statements, scoped registers and labels, operands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from .errors import EmulationError, UnknownInstruction
from .ptx_ir import (
    BANK_OF_TYPE,
    Address,
    Immediate,
    Instruction,
    Kernel,
    LabelRef,
    Module,
    Negated,
    Pair,
    Param,
    Register,
    Sink,
    Special,
    Symbol,
    Variable,
    Vector,
)

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*(\(|(?=[.{]))")
_LABEL = re.compile(r"\s*([$%\w]+)\s*:(?!:)")
_GUARD = re.compile(r"@(!?)\s*([%$\w]+)\s+")
_REG_DECL = re.compile(r"\.reg\s+\.(\w+)\s+(.*)", re.S)
_VARIABLE = re.compile(
    r"\.(shared|local|global|const)\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)\s*"
    r"((?:\[\s*\d*\s*\])*)\s*(?:=\s*(.*))?$",
    re.S,
)
_PARAM = re.compile(
    r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(?:\.ptr(?:\s*\.\w+)*(?:\s*\d+)?\s+)?"
    r"([\w$]+)\s*(?:\[(\d+)\])?"
)
_INTEGER = re.compile(r"-?(?:0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)U?$")
_DIRECTIVES = (".pragma", ".loc", ".file", ".section", ".weak", ".extern", ".callseq")
_SIZE = {"8": 1, "16": 2, "32": 4, "64": 8}


def _type_size(name: str) -> int:
    return _SIZE[name.lstrip("busf")]


def _align_up(value: int, align: int) -> int:
    return (value + align - 1) // align * align


def parse_module(ptx: str) -> Module:
    """Parse PTX text; kernels are decoded to code on their first launch."""
    text = _COMMENT.sub(lambda m: "\n" * m.group().count("\n"), ptx)
    target = re.search(r"\.target\s+([\w, ]+)", text)
    version = re.search(r"\.version\s+([\d.]+)", text)
    kernels: dict[str, Kernel] = {}
    shared: dict[str, Variable] = {}
    end = 0
    for match in _ENTRY.finditer(text):
        if match.start() < end:
            continue
        shared.update(_module_variables(text[end : match.start()]))
        brace = text.index("{", match.end())
        kernel = Kernel(match.group(1))
        header = text[match.end() : brace]
        _parse_header(kernel, header)
        end = _matching_brace(text, brace)
        kernel.variables.update(shared)
        line = text.count("\n", 0, brace) + 1
        _BodyParser(kernel).parse(text[brace + 1 : end], line)
        kernels[kernel.name] = kernel
    return Module(
        kernels,
        target.group(1).strip() if target else "",
        version.group(1) if version else "",
    )


def _matching_brace(text: str, start: int) -> int:
    depth = 0
    for match in re.compile(r"[{}]").finditer(text, start):
        depth += 1 if match.group() == "{" else -1
        if depth == 0:
            return match.start()
    raise EmulationError("unbalanced braces in the PTX text")


def _module_variables(text: str) -> dict[str, Variable]:
    found = {}
    for statement in text.split(";"):
        start = re.search(r"\.(shared|global|const)\b", statement)
        if start and (match := _VARIABLE.match(statement[start.start() :].strip())):
            variable = _variable(match)
            found[variable.name] = variable
    return found


def _variable(match: re.Match[str]) -> Variable:
    space, align, kind, name, dims, init = match.groups()
    size = _type_size(kind)
    count = 1
    for dim in re.findall(r"\[\s*(\d*)\s*\]", dims or ""):
        count *= int(dim) if dim else 0
    initial = b""
    if init:
        values = [int(v, 0) for v in re.findall(r"-?0x[0-9a-fA-F]+|-?\d+", init)]
        initial = b"".join((v % (1 << 8 * size)).to_bytes(size, "little") for v in values)
    return Variable(name, space, count * size, int(align or size), initial)


def _parse_header(kernel: Kernel, header: str) -> None:
    params, _, directives = header.rpartition(")")
    offset = 0
    for match in _PARAM.finditer(params):
        align, kind, name, count = match.groups()
        size = _type_size(kind) * int(count or 1)
        alignment = int(align or _type_size(kind))
        offset = _align_up(offset, alignment)
        kernel.params.append(Param(name, size, alignment, offset))
        offset += size
    for directive, attribute in (("reqntid", "reqntid"), ("reqnctapercluster", "cluster")):
        found = re.search(rf"\.{directive}\s+([\d,\s]+)", directives)
        if found:
            sizes = [int(v) for v in found.group(1).split(",") if v.strip()]
            setattr(kernel, attribute, (*sizes, 1, 1)[:3])


class _Scope:
    """Registers and labels of one brace block."""

    def __init__(self, parent: _Scope | None, number: int) -> None:
        self.parent = parent
        self.suffix = f"@{number}" if number else ""
        self.registers: dict[str, Register] = {}
        self.labels: dict[str, int] = {}

    def register(self, name: str) -> Register | None:
        scope: _Scope | None = self
        while scope is not None:
            if (found := scope.registers.get(name)) is not None:
                return found
            scope = scope.parent
        return None

    def label(self, name: str) -> int | None:
        scope: _Scope | None = self
        while scope is not None:
            if name in scope.labels:
                return scope.labels[name]
            scope = scope.parent
        return None


class _BodyParser:
    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.params = {p.name for p in kernel.params}
        self.scopes = 0
        self.scope = _Scope(None, 0)
        self.branches: list[tuple[Instruction, _Scope, str]] = []
        self.line = 0

    def parse(self, body: str, line: int) -> None:
        for statement, line_number in _statements(body, line):
            self.line = line_number
            if statement == "{":
                self.scopes += 1
                self.scope = _Scope(self.scope, self.scopes)
            elif statement == "}":
                assert self.scope.parent is not None
                self.scope = self.scope.parent
            elif statement.endswith(":"):
                self.scope.labels[statement[:-1].strip()] = len(self.kernel.instructions)
            else:
                self._statement(statement)
        for instruction, scope, name in self.branches:
            index = scope.label(name)
            if index is None:
                raise EmulationError(f"{instruction.where}: no label {name!r} in scope")
            instruction.operands = (LabelRef(index),)

    def _statement(self, text: str) -> None:
        if text.startswith("."):
            self._directive(text)
            return
        guard, negated = None, False
        original = " ".join(text.split())
        if match := _GUARD.match(text):
            guard = self._register(match.group(2), original)
            negated = match.group(1) == "!"
            text = text[match.end() :]
        opcode, rest = [*text.split(None, 1), ""][:2]
        if opcode.split(".")[0] == "bra":
            instruction = Instruction(opcode, (), guard, negated, self.line, original)
            self.branches.append((instruction, self.scope, rest.strip()))
        else:
            operands = tuple(self._operand(t, original) for t in _split(rest))
            instruction = Instruction(opcode, operands, guard, negated, self.line, original)
        self.kernel.instructions.append(instruction)

    def _directive(self, text: str) -> None:
        if match := _REG_DECL.match(text):
            bank = BANK_OF_TYPE.get(match.group(1))
            if bank is None:
                raise UnknownInstruction(f"PTX line {self.line}: {text}: register type")
            for name in match.group(2).split(","):
                self._declare(name.strip(), bank)
        elif match := _VARIABLE.match(text):
            variable = _variable(match)
            self.kernel.variables[variable.name] = variable
        elif not text.startswith(_DIRECTIVES):
            raise UnknownInstruction(f"PTX line {self.line}: {text}: directive")

    def _declare(self, name: str, bank: str) -> None:
        if match := re.match(r"(.+)<(\d+)>$", name):
            names = [f"{match.group(1)}{i}" for i in range(int(match.group(2)))]
        else:
            names = [name]
        suffix = self.scope.suffix
        for n in names:
            self.scope.registers[n] = Register(bank, n + suffix)

    def _register(self, name: str, text: str) -> Register:
        found = self.scope.register(name)
        if found is None:
            raise EmulationError(f"PTX line {self.line}: {text}: undeclared register {name!r}")
        return found

    def _operand(self, token: str, text: str) -> Any:
        if (register := self.scope.register(token)) is not None:
            return register
        if token[0] == "{":
            return Vector(tuple(self._operand(t, text) for t in _split(token[1:-1])))
        if token[0] == "[":
            return self._address(token[1:-1].strip(), text)
        if token[0] == "!":
            return Negated(self._register(token[1:].strip(), text))
        if "|" in token:
            left, right = token.split("|")
            return Pair(self._operand(left.strip(), text), self._operand(right.strip(), text))
        if token == "_":
            return Sink()
        return self._literal(token, text)

    def _literal(self, token: str, text: str) -> Any:
        if _INTEGER.match(token):
            return Immediate(int(token.rstrip("U"), 0) if not _is_octal(token) else int(token, 8))
        if token[:2] in ("0f", "0F"):
            return Immediate(int(token[2:], 16), 32)
        if token[:2] in ("0d", "0D"):
            return Immediate(int(token[2:], 16), 64)
        name, _, offset = token.partition("+")
        if name in self.params or name in self.kernel.variables:
            return Symbol(name, int(offset, 0) if offset else 0)
        if token.startswith("%"):
            return Special(token)
        raise UnknownInstruction(f"PTX line {self.line}: {text}: operand {token!r}")

    def _address(self, inner: str, text: str) -> Address:
        pieces = _split(inner)
        coordinates: tuple[Any, ...] = ()
        if len(pieces) == 2:
            vector = self._operand(pieces[1], text)
            coordinates = vector.items if isinstance(vector, Vector) else (vector,)
        match = re.match(r"([%$\w.]+)\s*(?:([+-])\s*(-?\w+))?$", pieces[0])
        if match is None:
            raise UnknownInstruction(f"PTX line {self.line}: {text}: address {inner!r}")
        offset = int(match.group(3), 0) if match.group(3) else 0
        if match.group(2) == "-":
            offset = -offset
        return Address(self._operand(match.group(1), text), offset, coordinates)


def _is_octal(token: str) -> bool:
    digits = token.lstrip("-").rstrip("U")
    return len(digits) > 1 and digits[0] == "0" and digits.isdigit()


def _split(text: str) -> list[str]:
    """Split an operand list at its top-level commas."""
    if "{" not in text and "[" not in text:
        return [t for t in (p.strip() for p in text.split(",")) if t]
    pieces, depth, start = [], 0, 0
    for match in re.finditer(r"[{}\[\],]", text):
        char = match.group()
        if char in "{[":
            depth += 1
        elif char in "}]":
            depth -= 1
        elif depth == 0:
            pieces.append(text[start : match.start()].strip())
            start = match.end()
    pieces.append(text[start:].strip())
    return [p for p in pieces if p]


def _statements(body: str, line: int) -> Iterator[tuple[str, int]]:
    """Yield statements, `label:`, `{` and `}` with their line numbers."""
    position, length = 0, len(body)
    space = re.compile(r"\s*")
    while True:
        match = space.match(body, position)
        assert match is not None
        line += body.count("\n", position, match.end())
        position = match.end()
        if position >= length:
            return
        char = body[position]
        if char in "{}":
            yield char, line
            position += 1
        elif char == ";":
            position += 1
        elif label := _LABEL.match(body, position):
            yield label.group(1) + ":", line
            position = label.end()
        else:
            end = body.find(";", position)
            if end < 0:
                raise EmulationError(f"PTX line {line}: statement without a semicolon")
            yield body[position:end].strip(), line
            line += body.count("\n", position, end)
            position = end + 1
