"""Bodies of kernels and device functions: statements, scoped registers and labels, operands."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from .errors import EmulationError, UnknownInstruction
from .ptx_ir import (
    BANK_OF_TYPE,
    Address,
    Immediate,
    Instruction,
    Kernel,
    LabelRef,
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
from .ptx_variables import VARIABLE, parameters, variable

_LABEL = re.compile(r"\s*([$%\w]+)\s*:(?!:)")
_GUARD = re.compile(r"@(!?)\s*([%$\w]+)\s+")
_REG_DECL = re.compile(r"\.reg\s+\.(\w+)\s+(.*)", re.S)
_CALL = re.compile(r"(?:(\([^)]*\))\s*,\s*)?([\w$%]+)\s*(?:,\s*(\([^)]*\))\s*)?(,.*)?$", re.S)
_INTEGER = re.compile(r"-?(?:0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)U?$")
_DIRECTIVES = (".pragma", ".loc", ".file", ".section", ".weak", ".extern", ".callseq")
# Directives that end with their line.
_LINE = re.compile(r"\.(loc|file)\b[^\n]*")
_LOC = re.compile(r"\.loc\s+(\d+)\s+(\d+)")
_MAX_CALL_DEPTH = 32
# A label that no text can hold.
_RETURN = "<return>"


class Function(NamedTuple):
    """The text of a kernel or device function; `body` is None for a declaration."""

    name: str
    returns: str
    params: str
    directives: str
    body: str | None
    line: int
    span: tuple[int, int]


class _Scope:
    """Registers and labels of one brace block."""

    def __init__(self, parent: _Scope | None, number: int) -> None:
        self.parent = parent
        self.suffix = f"@{number}" if number else ""
        self.registers: dict[str, Register] = {}
        self.labels: dict[str, int] = {}
        self.symbols: dict[str, str] = {}
        """Variables of this scope by the name that the text uses."""

    def register(self, name: str) -> Register | None:
        scope: _Scope | None = self
        while scope is not None:
            if (found := scope.registers.get(name)) is not None:
                return found
            scope = scope.parent
        return None

    def symbol(self, name: str) -> str | None:
        scope: _Scope | None = self
        while scope is not None:
            if name in scope.symbols:
                return scope.symbols[name]
            scope = scope.parent
        return None

    def label(self, name: str) -> int | None:
        scope: _Scope | None = self
        while scope is not None:
            if name in scope.labels:
                return scope.labels[name]
            scope = scope.parent
        return None


class BodyParser:
    """Appends the instructions of a kernel to it, with device functions inlined at each call."""

    def __init__(
        self, kernel: Kernel, functions: Mapping[str, Function], files: Mapping[int, str]
    ) -> None:
        self.kernel = kernel
        self.files = files
        self.source = ""
        self.functions = functions
        self.params = {p.name for p in kernel.params}
        self.scopes = 0
        self.scope = _Scope(None, 0)
        self.branches: list[tuple[Instruction, _Scope, str]] = []
        self.calls: list[str] = []
        self.line = 0

    def parse(self, function: Function) -> None:
        """The kernel itself, or a device function at the place where it is called."""
        for statement, line_number in _statements(function.body or "", function.line):
            self.line = line_number
            if statement == "{":
                self._open_scope(self.scope)
            elif statement == "}":
                assert self.scope.parent is not None
                self.scope = self.scope.parent
            elif statement.endswith(":"):
                self.scope.labels[statement[:-1].strip()] = len(self.kernel.instructions)
            else:
                self._statement(statement)
        if not self.calls:
            self._resolve_branches()

    def _open_scope(self, parent: _Scope | None) -> None:
        self.scopes += 1
        self.scope = _Scope(parent, self.scopes)

    def _resolve_branches(self) -> None:
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
        root = opcode.split(".", 1)[0]
        if root == "call":
            self._call(self._instruction(opcode, (), guard, negated, original), rest)
            return
        if root == "bra" or (root == "ret" and self.calls):
            target = rest.strip() if root == "bra" else _RETURN
            opcode = opcode if root == "bra" else "bra"
            instruction = self._instruction(opcode, (), guard, negated, original)
            self.branches.append((instruction, self.scope, target))
        else:
            operands = tuple([self._operand(t, original) for t in _split(rest)])
            opcode = _in_call_parameters(opcode, operands, inlined=bool(self.calls))
            instruction = self._instruction(opcode, operands, guard, negated, original)
        self.kernel.instructions.append(instruction)

    def _instruction(
        self, opcode: str, operands: tuple[Any, ...], guard: Any, negated: bool, text: str
    ) -> Instruction:
        return Instruction(opcode, operands, guard, negated, self.line, text, self.source)

    def _call(self, instruction: Instruction, text: str) -> None:
        """Inlines a device function; its parameters are the caller's `.param` variables."""
        match = _CALL.match(text.strip())
        name = match[2] if match else ""
        function = self.functions.get(name)
        if match is None or function is None or instruction.guard is not None:
            raise UnknownInstruction(f"{instruction.where}: only direct calls are emulated")
        given = [t for group in (match[1], match[3]) for t in _split((group or "()")[1:-1])]
        if function.body is None:
            operands = tuple(self._operand(t, instruction.text) for t in given)
            self.kernel.instructions.append(
                self._instruction(f"call.{name}", operands, None, False, instruction.text)
            )
            return
        if name in self.calls or len(self.calls) >= _MAX_CALL_DEPTH:
            raise UnknownInstruction(f"{instruction.where}: recursive calls are not emulated")
        formal = [
            p.name for group in (function.returns, function.params) for p in parameters(group)
        ]
        actual = [self.scope.symbol(t) for t in given]
        if len(formal) != len(actual) or None in actual:
            raise UnknownInstruction(f"{instruction.where}: arguments must be .param variables")
        caller = self.scope
        self._open_scope(None)
        self.scope.symbols = {f: a for f, a in zip(formal, actual, strict=True) if a is not None}
        body = self.scope
        self.calls.append(name)
        self.parse(function)
        self.calls.pop()
        body.labels[_RETURN] = len(self.kernel.instructions)
        self.scope = caller

    def _directive(self, text: str) -> None:
        if match := _REG_DECL.match(text):
            bank = BANK_OF_TYPE.get(match.group(1))
            if bank is None:
                raise UnknownInstruction(f"PTX line {self.line}: {text}: register type")
            for name in match.group(2).split(","):
                self._declare(name.strip(), bank)
        elif match := VARIABLE.match(text):
            declared = variable(match)
            self.kernel.variables[declared.name] = declared
        elif text.startswith(".param"):
            for param in parameters(text):
                self._declare_call_parameter(param)
        elif match := _LOC.match(text):
            name = self.files.get(int(match[1]), "")
            self.source = f"{name}:{match[2]}" if name else ""
        elif not text.startswith(_DIRECTIVES):
            raise UnknownInstruction(f"PTX line {self.line}: {text}: directive")

    def _declare_call_parameter(self, param: Param) -> None:
        """An argument or result of a call: a variable of its own in local memory."""
        name = f"{param.name}@{self.scope.suffix}"
        self.scope.symbols[param.name] = name
        self.kernel.variables[name] = Variable(name, "local", param.size, param.align)

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
        if (local := self.scope.symbol(name)) is not None:
            return Symbol(local, int(offset, 0) if offset else 0)
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


def _in_call_parameters(opcode: str, operands: tuple[Any, ...], inlined: bool) -> str:
    """ld.param and st.param of call arguments, which live in local memory; else unchanged."""
    if not opcode.startswith(("ld.param", "st.param")):
        return opcode
    root, _, rest = opcode.partition(".param")
    if not rest:
        return opcode
    base = next((o.base for o in operands if isinstance(o, Address)), None)
    in_call = "@" in base.name if isinstance(base, Symbol) else inlined
    return f"{root}.local{rest.removeprefix('::func')}" if in_call else opcode


def _is_octal(token: str) -> bool:
    digits = token.lstrip("-").rstrip("U")
    return len(digits) > 1 and digits[0] == "0" and digits.isdigit()


def _split(text: str) -> list[str]:
    """Split an operand list at its top-level commas."""
    if "{" not in text and "[" not in text:
        return [t for p in text.split(",") if (t := p.strip())]
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
        elif directive := _LINE.match(body, position):
            yield directive.group().strip(), line
            position = directive.end()
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
