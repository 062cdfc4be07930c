"""What the PTX parser produces: modules, kernels, instructions and operands."""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import Lock
from typing import Any, NamedTuple

# Register banks by width: predicate, 16, 32, 64 bits.
BANK_OF_TYPE = {
    "pred": "p",
    **dict.fromkeys(("b8", "u8", "s8", "b16", "u16", "s16", "f16", "bf16"), "h"),
    **dict.fromkeys(("b32", "u32", "s32", "f32", "f16x2", "bf16x2"), "u"),
    **dict.fromkeys(("b64", "u64", "s64", "f64"), "q"),
}


class Register(NamedTuple):
    """A virtual register; `name` is unique within the kernel (scoped names carry their scope)."""

    bank: str
    name: str


class Immediate(NamedTuple):
    """A literal; float literals are kept as their bits (`width` 32 or 64), integers have 0."""

    value: int
    width: int = 0


class Symbol(NamedTuple):
    """The address of a parameter or variable."""

    name: str
    offset: int = 0


class Special(NamedTuple):
    """A special register such as %tid.x."""

    name: str


class Negated(NamedTuple):
    """A logically negated predicate operand."""

    register: Register


class Vector(NamedTuple):
    """A brace list of operands."""

    items: tuple[Any, ...]


class Pair(NamedTuple):
    """`d|p`: an instruction with two destinations."""

    first: Any
    second: Any


class Address(NamedTuple):
    """`[base+offset]`, with tensor coordinates where there are any."""

    base: Any
    offset: int = 0
    coordinates: tuple[Any, ...] = ()


class Sink(NamedTuple):
    """`_`: the result is dropped."""


class LabelRef(NamedTuple):
    """A branch target: the position of an instruction."""

    position: int


@dataclass(eq=False)
class Instruction:
    """One PTX instruction with resolved registers."""

    opcode: str
    operands: tuple[Any, ...]
    guard: Register | None
    guard_negated: bool
    line: int
    text: str
    source: str = ""
    """Python file and line, where the PTX has line information."""
    parts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.parts = tuple(self.opcode.split("."))

    @property
    def where(self) -> str:
        text = self.text if len(self.text) <= 120 else self.text[:117] + "..."
        return f"PTX line {self.line}: {text}" + (f" ({self.source})" if self.source else "")


@dataclass(frozen=True)
class Param:
    """A kernel parameter at its offset in the parameter buffer."""

    name: str
    size: int
    align: int
    offset: int


@dataclass(frozen=True)
class Variable:
    """A module or kernel variable in .shared, .local, .global or .const space."""

    name: str
    space: str
    size: int
    align: int
    initial: bytes = b""


@dataclass
class Kernel:
    """A kernel entry: parameters, variables and the flat list of instructions."""

    name: str
    params: list[Param] = field(default_factory=list)
    variables: dict[str, Variable] = field(default_factory=dict)
    arrays: dict[str, Any] = field(default_factory=dict)
    """Memory of the module's .global and .const variables, by name."""
    instructions: list[Instruction] = field(default_factory=list)
    reqntid: tuple[int, int, int] | None = None
    maxnreg: int = 0
    minnctapersm: int = 0
    cluster: tuple[int, int, int] | None = None
    # Filled by the code generator on first launch; a later launch of the same kernel reuses it.
    program: Any = None
    # Functions with the same PTX share the program, and with it its counts and register files.
    lock: Any = field(default_factory=Lock)

    @property
    def param_bytes(self) -> int:
        return max((p.offset + p.size for p in self.params), default=0)


@dataclass
class Module:
    """A parsed PTX module."""

    kernels: dict[str, Kernel]
    target: str = ""
    version: str = ""
