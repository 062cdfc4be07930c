"""SASS listings through nvdisasm."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from hopperflash.errors import HopperflashError

_WHEEL = "nvidia-cuda-nvdisasm"
_SECTION = re.compile(r"\s*\.section\s+\.text\.([^,\s]+)")
_LABEL = re.compile(r"(\.L_[\w$]+):")
_INSTRUCTION = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*([^;]*);")
_LOCAL_ACCESS = ("LDL", "STL")


class DisassemblerMissing(HopperflashError, RuntimeError):
    """nvdisasm is not installed."""


@dataclass(frozen=True)
class SassInstruction:
    """One machine instruction."""

    address: int
    opcode: str
    """With modifiers, such as `HGMMA.64x128x16.F32.BF16`."""
    operands: str
    predicate: str = ""

    @property
    def access_bytes(self) -> int:
        """Bytes per thread that a load, store or reduction moves, by the width in its modifiers."""
        widths = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "F32x2": 8, "F32x4": 16}
        return next((widths[part] for part in self.opcode.split(".") if part in widths), 4)


@dataclass(frozen=True)
class SassListing:
    """The instructions of a kernel in address order."""

    instructions: tuple[SassInstruction, ...]
    labels: dict[str, int]
    """Address of the instruction behind each branch label."""

    @cached_property
    def opcodes(self) -> Counter[str]:
        """How often each opcode occurs, modifiers included."""
        return Counter(instruction.opcode for instruction in self.instructions)

    def count(self, prefix: str) -> int:
        """Instructions whose opcode starts with the dotted parts of `prefix` (`LDG`, `LDG.E`)."""
        return sum(
            number
            for opcode, number in self.opcodes.items()
            if opcode == prefix or opcode.startswith(prefix + ".")
        )

    @property
    def local_bytes(self) -> int:
        """Bytes that local loads and stores in the code move per thread, each counted once."""
        return sum(
            instruction.access_bytes
            for instruction in self.instructions
            if instruction.opcode.split(".")[0] in _LOCAL_ACCESS
        )


def disassemble(cubin: bytes) -> dict[str, SassListing]:
    """Listings of all kernels in a cubin, by kernel name."""
    return parse_listing(disassembly(cubin))


def disassembly(cubin: bytes) -> str:
    """What `nvdisasm --print-code` prints for a cubin."""
    tool = find_nvdisasm()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernels.cubin"
        path.write_bytes(cubin)
        result = subprocess.run(
            [tool, "--print-code", path], capture_output=True, text=True, check=False
        )
    if result.returncode:
        raise HopperflashError("nvdisasm failed:", [result.stderr.strip()])
    return result.stdout


def parse_listing(text: str) -> dict[str, SassListing]:
    """Reads the output of `nvdisasm --print-code`."""
    return {name: _parse_section(lines) for name, lines in _text_sections(text)}


def find_nvdisasm() -> Path:
    """The nvdisasm of the installed wheel, or else the one on PATH."""
    try:
        files = importlib.metadata.files(_WHEEL) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        located = Path(str(file.locate()))
        if located.stem == "nvdisasm" and located.parent.name == "bin":
            return located
    on_path = shutil.which("nvdisasm")
    if on_path is None:
        raise DisassemblerMissing("nvdisasm not found:", [f"pip install {_WHEEL}"])
    return Path(on_path)


def _text_sections(text: str) -> Iterator[tuple[str, list[str]]]:
    name: str | None = None
    lines: list[str] = []
    for line in text.splitlines():
        header = _SECTION.match(line)
        if header is None:
            lines.append(line)
            continue
        if name is not None:
            yield name, lines
        name, lines = header[1], []
    if name is not None:
        yield name, lines


def _parse_section(lines: list[str]) -> SassListing:
    instructions: list[SassInstruction] = []
    labels: dict[str, int] = {}
    pending: list[str] = []
    for line in lines:
        label = _LABEL.match(line)
        if label is not None:
            pending.append(label[1])
            continue
        match = _INSTRUCTION.match(line)
        if match is None:
            continue
        address, predicate, opcode, operands = match.groups()
        instruction = SassInstruction(int(address, 16), opcode, operands.strip(), predicate or "")
        labels.update(dict.fromkeys(pending, instruction.address))
        pending.clear()
        instructions.append(instruction)
    return SassListing(tuple(instructions), labels)
