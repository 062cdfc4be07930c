"""Calls of functions that the device runtime provides: vprintf and __assertfail."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from .address_spaces import space_of
from .decode import Effect, Op, RowOf, effect, unknown
from .errors import EmulationError
from .operands import active
from .ptx_ir import Instruction, Symbol

_CONVERSION = re.compile(
    r"%(?P<flags>[-+ #0]*)(?P<width>\d*)(?P<precision>(?:\.\d+)?)"
    r"(?P<length>hh|h|ll|l|z|j|t)?(?P<kind>[diouxXeEfFgGaAcsp%])"
)
_MAX_STRING = 1 << 16


class _Thread:
    """Memory as one thread sees it."""

    def __init__(self, gang: Any, lane: int, ins: Instruction) -> None:
        self._gang, self._lane, self._ins = gang, lane, ins

    def read(self, space: str, address: int, nbytes: int) -> bytes:
        """Bytes of a state space; "" is generic."""
        addresses = np.arange(address, address + nbytes, dtype=np.int64)
        lanes = np.full(nbytes, self._lane)
        gang = self._gang
        if not space and space_of(addresses) == "global":
            # Not traffic of the kernel's own.
            return bytes(gang.cta.machine.memory.view(address, nbytes))
        raw: bytes = gang.cta.load(space, addresses, 1, 1, gang, lanes, self._ins)[0].tobytes()
        return raw

    def argument(self, symbol: Symbol, nbytes: int = 8) -> int:
        """A call argument."""
        address = self._gang.cta.symbol_address(symbol)
        return int.from_bytes(self.read("local", address, nbytes), "little")

    def string(self, address: int) -> str:
        """A zero-terminated string at a generic address."""
        raw = bytearray()
        while len(raw) < _MAX_STRING:
            byte = self.read("", address + len(raw), 1)
            if byte == b"\0":
                return raw.decode(errors="replace")
            raw += byte
        raise EmulationError(f"the string at {address:#x} has no end")


def format_text(thread: _Thread, form: str, buffer: int) -> str:
    """`form` with the packed arguments of a vprintf at a generic address."""
    offset = 0

    def take(nbytes: int) -> bytes:
        nonlocal offset
        offset = -(-offset // nbytes) * nbytes
        raw = thread.read("", buffer + offset, nbytes)
        offset += nbytes
        return raw

    def replace(match: re.Match[str]) -> str:
        kind, flags = match["kind"], "".join(match.group("flags", "width", "precision"))
        if kind == "%":
            return "%"
        if kind in "aA":
            raise EmulationError("printf: %a is not emulated")
        if kind in "eEfFgG":
            return f"%{flags}{kind}" % float(np.frombuffer(take(8), np.float64)[0])
        if kind == "s":
            return f"%{flags}s" % thread.string(int.from_bytes(take(8), "little"))
        if kind == "p":
            return f"%{flags}s" % hex(int.from_bytes(take(8), "little"))
        raw = take(8 if match["length"] in ("l", "ll", "z", "j", "t") else 4)
        value = int.from_bytes(raw, "little", signed=kind in "di")
        return f"%{flags}{kind.replace('u', 'd')}" % (value & 0xFF if kind == "c" else value)

    return _CONVERSION.sub(replace, form)


def _threads(g: Any, m: Any, ins: Instruction) -> Iterator[_Thread]:
    for lane in active(m, g):
        yield _Thread(g, int(lane), ins)


def decode_vprintf(ins: Instruction) -> Op:
    """Prints at once, in lane order, to stdout and to the run."""
    if len(ins.operands) != 3 or not all(isinstance(o, Symbol) for o in ins.operands):
        raise unknown(ins, "operands")
    result, form, buffer = ins.operands

    def run(g: Any, m: Any) -> None:
        for thread in _threads(g, m, ins):
            text = thread.string(thread.argument(form))
            printed = format_text(thread, text, thread.argument(buffer))
            g.cta.machine.counters.printed.append(printed)
            sys.stdout.write(printed)
        lanes = active(m, g)
        if lanes.size:
            addresses = np.full(len(lanes), g.cta.symbol_address(result), np.int64)
            values = np.zeros((1, len(lanes)), np.uint32)
            g.cta.store("local", addresses, values, g, lanes, ins)

    return effect(ins, lambda row: run)


def decode_assertfail(ins: Instruction) -> Op:
    """A failed assertion: message, file, line and function as the compiler passes them."""

    def make(row: RowOf) -> Effect:
        def run(g: Any, m: Any) -> None:
            for thread in _threads(g, m, ins):
                message, file = (thread.string(thread.argument(o)) for o in ins.operands[:2])
                line = thread.argument(ins.operands[2], 4)
                raise EmulationError(f"assertion failed at {file}:{line}: {message}")

        return run

    return effect(ins, make, ends=True)


CALL_OPS: dict[str, Callable[[Instruction], Op]] = {
    "call.vprintf": decode_vprintf,
    "call.__assertfail": decode_assertfail,
}
