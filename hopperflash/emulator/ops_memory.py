"""Generic-proxy memory opcodes: ld, st, atom, red, ldmatrix, stmatrix, cp.async, prefetch."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .address_spaces import parts, space_of
from .bank_conflicts import extra_wavefronts
from .decode import Effect, Op, RowOf, effect, unknown
from .fragments import from_rows, to_rows
from .memory import unsigned
from .numeric import bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16
from .operands import active, address_reader, lanes_of, reader, writer
from .ptx_ir import Address, Immediate, Instruction, Symbol, Vector

_ORDERS = {"weak", "volatile", "relaxed", "acquire", "release", "acq_rel", "seq_cst", "mmio"}
_SCOPES = {"cta", "cluster", "gpu", "sys"}
_SPACES = {"global", "shared", "shared::cta", "shared::cluster", "local", "param", "param::entry",
           "const"}  # fmt: skip
_CACHE = re.compile(
    r"(ca|cg|cs|lu|cv|wb|wt|nc|unified|L1::\w+|L2::(cache_hint|\d+B|evict_\w+)|evict_\w+)$"
)
_VECTORS = {"v2": 2, "v4": 4}
_TYPE = re.compile(r"[busf](8|16|32|64)$")


def count_conflicts(
    g: Any, space: str, addrs: NDArray[np.int64], lanes: NDArray[np.int64] | None, nbytes: int
) -> None:
    """Adds the bank conflicts of an access to shared memory."""
    if space == "shared" or (not space and space_of(addrs) == "shared"):
        threads = (np.arange(g.n) if lanes is None else lanes) + g.lo
        g.cta.machine.counters.shared_bank_conflicts += extra_wavefronts(addrs, threads, nbytes)


class _Access:
    """The modifiers of an ld or st."""

    def __init__(self, ins: Instruction) -> None:
        self.space = ""
        self.count = 1
        self.polls = False
        kind = ins.parts[-1]
        if not _TYPE.match(kind):
            raise unknown(ins, f"type {kind}")
        self.size = int(kind[1:]) // 8
        self.signed = kind[0] == "s"
        for part in ins.parts[1:-1]:
            if part in _SPACES:
                self.space = part.split("::")[0]
            elif part in _VECTORS:
                self.count = _VECTORS[part]
            elif part in _ORDERS:
                self.polls |= part in ("volatile", "acquire", "relaxed")
            elif part not in _SCOPES and not _CACHE.match(part):
                raise unknown(ins, f"modifier .{part}")


def _items(operand: Any) -> tuple[Any, ...]:
    return operand.items if isinstance(operand, Vector) else (operand,)


def _view(register: Any) -> str:
    return register.bank if hasattr(register, "bank") else "u"


def decode_ld(ins: Instruction) -> Op:
    access = _Access(ins)
    dst, address = ins.operands[:2]
    items = _items(dst)
    if len(items) != access.count or not isinstance(address, Address):
        raise unknown(ins, "operands")
    if access.space == "param" and isinstance(address.base, Symbol):
        return _decode_ld_param(ins, access, items, address)

    def make(row: RowOf) -> Effect:
        at = address_reader(address, row)
        writers = [(writer(i, _view(i), row), _view(i)) for i in items]
        size, count, space, signed = access.size, access.count, access.space, access.signed
        nbytes = size * count

        def run(g: Any, m: Any) -> None:
            lanes = None if m is None else np.nonzero(m)[0]
            if lanes is not None and not lanes.size:
                return
            addrs = at(g) if lanes is None else at(g)[lanes]
            count_conflicts(g, space, addrs, lanes, nbytes)
            values = g.cta.load(space, addrs, size, count, g, lanes, ins)
            for (write, view), value in zip(writers, values, strict=True):
                value = _extend(value, view, signed)
                if lanes is None:
                    write(g, value, None)
                else:
                    full = np.empty(g.n, value.dtype)
                    full[lanes] = value
                    write(g, full, m)

        return run

    polls = access.polls and access.space != "local"
    return effect(ins, make, writes=items, reads=(address, *_kept(ins, items)), yields=polls)


def _kept(ins: Instruction, items: tuple[Any, ...]) -> tuple[Any, ...]:
    return items if ins.guard else ()


def _extend(value: NDArray[Any], view: str, signed: bool) -> NDArray[Any]:
    wide: Any = {"h": np.uint16, "u": np.uint32, "q": np.uint64}[view]
    if value.dtype == wide:
        return value
    if signed:
        signed_wide: Any = {"h": np.int16, "u": np.int32, "q": np.int64}[view]
        return value.view(f"i{value.dtype.itemsize}").astype(signed_wide).view(wide)
    return value.astype(wide)


def _decode_ld_param(
    ins: Instruction, access: _Access, items: tuple[Any, ...], address: Address
) -> Op:
    symbol = Symbol(address.base.name, address.base.offset + address.offset)

    def make(row: RowOf) -> Effect:
        writers = [(writer(i, _view(i), row), _view(i)) for i in items]

        def run(g: Any, m: Any) -> None:
            raw = g.cta.param_bytes(symbol, access.size * access.count)
            values = np.frombuffer(raw, unsigned(access.size))
            for (write, view), value in zip(writers, values, strict=True):
                write(g, _extend(np.asarray(value).reshape(1), view, access.signed), m)

        return run

    return effect(ins, make, writes=items, reads=_kept(ins, items), ordered=False)


def decode_st(ins: Instruction) -> Op:
    access = _Access(ins)
    address, src = ins.operands[:2]
    items = _items(src)
    if len(items) != access.count or not isinstance(address, Address):
        raise unknown(ins, "operands")
    if access.space in ("param", "const"):
        raise unknown(ins, f"store to .{access.space}")

    def make(row: RowOf) -> Effect:
        at = address_reader(address, row)
        narrow = {1: "h", 2: "h", 4: "u", 8: "q"}[access.size]
        readers = [reader(i, getattr(i, "bank", narrow), row) for i in items]
        kind, space = unsigned(access.size), access.space

        def run(g: Any, m: Any) -> None:
            lanes = None if m is None else np.nonzero(m)[0]
            if lanes is not None and not lanes.size:
                return
            addrs = at(g)
            values = np.empty((len(readers), g.n), kind)
            for i, read in enumerate(readers):
                values[i] = read(g).astype(kind)
            if lanes is not None:
                addrs, values = addrs[lanes], values[:, lanes]
            count_conflicts(g, space, addrs, lanes, len(readers) * access.size)
            g.cta.store(space, addrs, values, g, lanes, ins)

        return run

    return effect(ins, make, reads=(address, src))


# What an atomic does to the old value; the operand type decides the view.
_ATOMIC: dict[str, Callable[..., Any]] = {
    "add": np.add, "min": np.minimum, "max": np.maximum,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    "exch": lambda old, new: new,
}  # fmt: skip
_ATOMIC_TYPES: dict[str, Any] = {
    "u32": np.uint32, "s32": np.int32, "b32": np.uint32, "f32": np.float32,
    "u64": np.uint64, "s64": np.int64, "b64": np.uint64, "f64": np.float64,
    "b16": np.uint16, "f16": "f16", "bf16": "bf16", "f16x2": "f16", "bf16x2": "bf16",
}  # fmt: skip


def decode_atomic(ins: Instruction) -> Op:
    """atom and red; lanes at one address go one after the other, in lane order."""
    operation, kind, space, count = "", ins.parts[-1], "", 1
    for part in ins.parts[1:-1]:
        if part in _SPACES:
            space = part.split("::")[0]
        elif part in (*_ATOMIC, "cas", "inc", "dec"):
            operation = part
        elif part in _VECTORS:
            count = _VECTORS[part]
        elif part not in _ORDERS | _SCOPES | {"noftz"} and not _CACHE.match(part):
            raise unknown(ins, f"modifier .{part}")
    if kind not in _ATOMIC_TYPES or not operation:
        raise unknown(ins, "operation or type")
    returns = ins.parts[0] == "atom"
    dst = ins.operands[0] if returns else None
    address, *sources = ins.operands[1:] if returns else ins.operands
    size = 8 if kind.endswith("64") else 2 if kind in ("f16", "bf16", "b16") else 4

    def make(row: RowOf) -> Effect:
        at = address_reader(address, row)
        view = {2: "h", 4: "u", 8: "q"}[size]
        readers = [[reader(i, view, row) for i in _items(s)] for s in sources]
        writers = [writer(d, view, row) for d in _items(dst)] if returns else []
        update = _atomic_update(operation, kind)

        def run(g: Any, m: Any) -> None:
            lanes = active(m, g)
            addrs = at(g)
            values = [[lanes_of(r(g), g) for r in group] for group in readers]
            old = np.zeros((count, g.n), unsigned(size))
            for c in range(count):
                where = addrs + c * size
                for together in _apart(where, lanes):
                    operands = [group[c][together] for group in values]
                    old[c, together] = g.cta.atomic(
                        space, where[together], size, lambda before, o=operands: update(before, *o),
                        g, together, ins,
                    )  # fmt: skip
            for c, write in enumerate(writers):
                write(g, old[c], m)

        return run

    return effect(
        ins, make, writes=_items(dst) if returns else (), reads=(address, *sources), yields=returns
    )


def _apart(addrs: NDArray[np.int64], lanes: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """All lanes at once where their addresses differ and lie in one memory, else each alone."""
    different = len(np.unique(addrs[lanes])) == len(lanes)
    if different and len(lanes) and parts("", addrs[lanes]) is None:
        return [lanes]
    return [lane[None] for lane in lanes]


def _atomic_update(operation: str, kind: str) -> Callable[..., Any]:
    if operation == "cas":
        return lambda old, compare, new: np.where(old == compare, new, old)
    if operation == "inc":
        return lambda old, top: np.where(old >= top, 0, old + 1).astype(old.dtype)
    if operation == "dec":
        return lambda old, top: np.where((old == 0) | (old > top), top, old - 1).astype(old.dtype)
    fn, target = _ATOMIC[operation], _ATOMIC_TYPES[kind]
    if isinstance(target, str):
        load, store = (bf16_to_f32, f32_to_bf16) if target == "bf16" else (f16_to_f32, f32_to_f16)

        def update(old: Any, new: Any) -> Any:
            a, b = old.view(np.uint16), np.ascontiguousarray(new).view(np.uint16)
            return store(fn(load(a), load(b))).astype(np.uint16).view(old.dtype)

        return update
    return lambda old, new: fn(old.view(target), new.view(target)).view(old.dtype)


_ROW_BYTES = 16
_MATRIX = re.compile(
    r"(ld|st)matrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared(::cta)?\.b16$"
)


def decode_matrix(ins: Instruction) -> Op:
    """ldmatrix and stmatrix: 8x8 matrices of 16-bit elements, row addresses from lanes 8j+r."""
    match = _MATRIX.match(ins.opcode)
    if match is None:
        raise unknown(ins)
    count, transposed = int(match[2]), match[3] is not None
    loads = match[1] == "ld"
    data, address = ins.operands if loads else ins.operands[::-1]
    items = _items(data)
    if len(items) != count:
        raise unknown(ins, "register count")

    def make(row: RowOf) -> Effect:
        at = address_reader(address, row)
        rows = [row(i) for i in items]

        def row_lanes(g: Any) -> NDArray[np.int64]:
            lanes: NDArray[np.int64] = g.every.reshape(-1, 32)[:, : 8 * count].ravel()
            return lanes

        def load(g: Any, m: Any) -> None:
            lanes = row_lanes(g)
            addrs = at(g)[lanes]
            count_conflicts(g, "shared", addrs, lanes, _ROW_BYTES)
            words = g.cta.load("shared", addrs, 4, 4, g, lanes, ins)
            for r, values in zip(rows, from_rows(words.T, count, transposed), strict=True):
                g.u[r][...] = values

        def store(g: Any, m: Any) -> None:
            lanes = row_lanes(g)
            addrs = at(g)[lanes]
            count_conflicts(g, "shared", addrs, lanes, _ROW_BYTES)
            words = to_rows(g.U[rows], transposed)
            g.cta.store("shared", addrs, words.T, g, lanes, ins)

        return load if loads else store

    if loads:
        return effect(ins, make, writes=items, reads=(address,), collective="warp")
    return effect(ins, make, reads=(address, data), collective="warp")


_CP_ASYNC = re.compile(r"cp\.async\.(ca|cg)\.shared(::cta)?\.global(\.L2::\w+)*$")


def decode_cp_async(ins: Instruction) -> Op:
    """cp.async, with source size (zero fill) or without."""
    if not _CP_ASYNC.match(ins.opcode):
        raise unknown(ins)
    dst, src, nbytes, *rest = ins.operands
    if not isinstance(nbytes, Immediate) or nbytes.value not in (4, 8, 16):
        raise unknown(ins, "copy size")
    if "cache_hint" in ins.opcode:
        rest = rest[:-1]

    def make(row: RowOf) -> Effect:
        to, frm = address_reader(dst, row), address_reader(src, row)
        ignores = bool(rest) and getattr(rest[0], "bank", "") == "p"
        valid = reader(rest[0], "p" if ignores else "u", row) if rest else None

        def run(g: Any, m: Any) -> None:
            lanes = active(m, g)
            if not lanes.size:
                return
            sizes = None if valid is None else lanes_of(valid(g), g)[lanes].astype(np.int64)
            if ignores and sizes is not None:
                sizes = nbytes.value * (1 - sizes)
            g.cta.copy_async(g, lanes, to(g)[lanes], frm(g)[lanes], nbytes.value, sizes, ins)

        return run

    return effect(ins, make, reads=(dst, src, *rest))


def decode_nothing(ins: Instruction) -> Op:
    """Hints without an effect on results."""
    return effect(ins, lambda row: lambda g, m: None, ordered=False)


def decode_createpolicy(ins: Instruction) -> Op:
    """A cache policy: any value will do, since caches are not modelled."""
    dst = ins.operands[0]

    def make(row: RowOf) -> Effect:
        write = writer(dst, "q", row)
        return lambda g, m: write(g, np.uint64(0), m)

    return effect(ins, make, writes=(dst,), reads=ins.operands[1:], ordered=False)


MEMORY_OPS: dict[str, Callable[[Instruction], Op]] = {
    "ld": decode_ld,
    "ldu": decode_ld,
    "st": decode_st,
    "atom": decode_atomic,
    "red": decode_atomic,
    "ldmatrix": decode_matrix,
    "stmatrix": decode_matrix,
    "prefetch": decode_nothing,
    "prefetchu": decode_nothing,
    "applypriority": decode_nothing,
    "discard": decode_nothing,
    "createpolicy": decode_createpolicy,
    "cp.async.ca": decode_cp_async,
    "cp.async.cg": decode_cp_async,
}
