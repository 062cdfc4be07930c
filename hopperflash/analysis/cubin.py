"""Resources of compiled kernels, read from the cubin the DSL keeps (`--keep-cubin`)."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from hopperflash.analysis.sass import SassListing, disassemble
from hopperflash.errors import InvalidArgument

_INFO = ".nv.info"
_TEXT = ".text."
_SHARED = ".nv.shared."

# Attributes of .nv.info: (symbol index, value) pairs, one per kernel.
_REGISTER_COUNT = 0x2F
_FRAME_SIZE = 0x11
_MIN_STACK_SIZE = 0x12
_FORMAT_SIZED = 4  # a 16-bit payload size follows, then the payload


@dataclass(frozen=True)
class KernelResources:
    """What ptxas gave a kernel."""

    name: str
    registers: int
    """Per thread, at launch."""
    stack_bytes: int
    """Stack frame per thread; spills and indexed register arrays live there."""
    local_bytes: int
    """Bytes that the local loads and stores in the code move, each counted once: 0 = no spills."""
    shared_bytes: int
    """Static shared memory, with the share the system reserves."""
    sass: SassListing


def inspect_cubin(cubin: bytes) -> list[KernelResources]:
    """Registers, stack, local traffic, shared memory and SASS of every kernel in a cubin."""
    sections = _sections(cubin)
    listings = disassemble(cubin)
    names = _symbol_names(sections)
    values: dict[int, dict[str, int]] = {}
    for attribute, payload in _attributes(sections[_INFO].data if _INFO in sections else b""):
        if attribute in (_REGISTER_COUNT, _FRAME_SIZE, _MIN_STACK_SIZE):
            symbol, value = struct.unpack("<II", payload)
            values.setdefault(attribute, {})[names[symbol]] = value
    kernels = [name.removeprefix(_TEXT) for name in sections if name.startswith(_TEXT)]
    return [
        KernelResources(
            name=name,
            registers=values[_REGISTER_COUNT][name],
            stack_bytes=max(
                values.get(attribute, {}).get(name, 0)
                for attribute in (_FRAME_SIZE, _MIN_STACK_SIZE)
            ),
            local_bytes=listings[name].local_bytes,
            shared_bytes=sections[_SHARED + name].size if _SHARED + name in sections else 0,
            sass=listings[name],
        )
        for name in kernels
    ]


class _Section(NamedTuple):
    data: bytes
    size: int


_HEADER = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_NO_DATA = 8


def _sections(elf: bytes) -> dict[str, _Section]:
    if elf[:5] != b"\x7fELF\x02":
        raise InvalidArgument("not a cubin: a 64-bit ELF file is needed", [f"starts {elf[:8]!r}"])
    (start,) = struct.unpack_from("<Q", elf, 40)
    entry_size, count, names_index = struct.unpack_from("<HHH", elf, 58)
    headers = [_HEADER.unpack_from(elf, start + i * entry_size) for i in range(count)]
    names_offset = headers[names_index][4]
    found = {}
    for name, kind, _, _, offset, size, *_ in headers:
        data = b"" if kind == _NO_DATA else elf[offset : offset + size]
        found[_string(elf, names_offset + name)] = _Section(data, size)
    return found


def _symbol_names(sections: dict[str, _Section]) -> list[str]:
    strings = sections[".strtab"].data
    return [_string(strings, symbol[0]) for symbol in _SYMBOL.iter_unpack(sections[".symtab"].data)]


def _string(data: bytes, start: int) -> str:
    return data[start : data.index(b"\0", start)].decode()


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    position = 0
    while position < len(data):
        kind, attribute, value = struct.unpack_from("<BBH", data, position)
        position += 4
        size = value if kind == _FORMAT_SIZED else 0
        yield attribute, data[position : position + size]
        position += size
