"""wgmma operations of one warpgroup between issue and wait."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .element_types import ITEMSIZE
from .fragments import fragment_a
from .hazards import PendingRead
from .ptx_ir import Instruction
from .wgmma import (
    WgmmaShape,
    accumulate,
    accumulate_half,
    decode_smem_descriptor,
    operand_offsets,
    read_operand,
)

_TILE_M = 64


@dataclass(eq=False)
class WgmmaOp:
    """One issued wgmma of one warpgroup."""

    ins: Instruction
    shape: WgmmaShape
    d_rows: NDArray[np.int64]
    d_mask: int
    overwrite: bool
    a_registers: NDArray[np.uint32] | None
    a_descriptor: int
    b_descriptor: int
    negate: bool
    a_mn_major: bool
    b_mn_major: bool

    def continues(self, other: WgmmaOp) -> bool:
        """Can this operation be computed together with the one before it?"""
        return (
            not self.overwrite
            and self.shape == other.shape
            and self.shape.d_type == "f32"
            and (self.a_registers is None) == (other.a_registers is None)
            and self.negate == other.negate
            and self.a_mn_major == other.a_mn_major
            and self.b_mn_major == other.b_mn_major
            and (self.d_rows is other.d_rows or np.array_equal(self.d_rows, other.d_rows))
            and _same_layout(self.b_descriptor, other.b_descriptor)
            and (self.a_registers is not None
                 or _same_layout(self.a_descriptor, other.a_descriptor))
        )  # fmt: skip


def _same_layout(a: int, b: int) -> bool:
    return decode_smem_descriptor(a)[1:] == decode_smem_descriptor(b)[1:]


class WgmmaQueue:
    """In-order queue of a warpgroup: open operations and committed groups."""

    def __init__(self, cta: Any, group: int) -> None:
        self._cta = cta
        self._threads = slice(128 * group, 128 * group + 128)
        self._open: list[WgmmaOp] = []
        self._groups: deque[list[WgmmaOp]] = deque()
        self._executed: set[int] = set()
        self._reads: dict[int, list[PendingRead]] = {}
        self.in_flight = 0
        """Bit mask of accumulator rows that must not be touched."""

    def issue(self, op: WgmmaOp) -> None:
        self.in_flight |= op.d_mask
        self._check_proxy(op)
        self._open.append(op)

    def _check_proxy(self, op: WgmmaOp) -> None:
        track = self._cta.machine.async_work.schedule != "eager"
        if not track and self._cta.proxy.clean:
            return
        reads = []
        first_warp = self._threads.start // 32
        for quarter, addresses in operand_granules(op):
            reader = None if quarter is None else first_warp + quarter
            self._cta.proxy.async_read(addresses, op.ins, reader)
            if track:
                reads.append(PendingRead(op.ins, addresses))
        self._cta.reads.pending.extend(reads)
        self._reads[id(op)] = reads

    def commit(self) -> None:
        self._groups.append(self._open)
        self._open = []
        if self._cta.machine.async_work.at_issue():
            self._execute([op for group in self._groups for op in group], {})

    def wait(self, newest: int, operands: dict[Any, Any]) -> None:
        """Complete all but the `newest` committed groups; `operands` caches converted tiles."""
        done: list[WgmmaOp] = []
        while len(self._groups) > newest:
            done += self._groups.popleft()
        self._execute(done, operands)
        self._executed.difference_update(id(op) for op in done)
        self.in_flight = 0
        for op in (*(o for group in self._groups for o in group), *self._open):
            self.in_flight |= op.d_mask

    def outstanding(self) -> list[WgmmaOp]:
        return [*(op for group in self._groups for op in group), *self._open]

    def _execute(self, ops: list[WgmmaOp], operands: dict[Any, Any]) -> None:
        chain: list[WgmmaOp] = []
        for op in ops:
            if id(op) in self._executed:
                continue
            self._executed.add(id(op))
            if chain and not op.continues(chain[-1]):
                self._run_chain(chain, operands)
                chain = []
            chain.append(op)
        if chain:
            self._run_chain(chain, operands)

    def _run_chain(self, chain: list[WgmmaOp], operands: dict[Any, Any]) -> None:
        first, shared = chain[0], self._cta.shared
        shape = first.shape
        b_key = (tuple(op.b_descriptor for op in chain), shape, first.b_mn_major)
        b = operands.get(b_key)
        if b is None:
            b = operands[b_key] = read_operand(
                shared, b_key[0], shape.n, shape.k, shape.b_type, first.b_mn_major
            )
        a = self._read_a(chain)
        if first.negate:
            a = -a
        self._accumulate(first, a, b)
        for op in chain:
            for read in self._reads.pop(id(op), ()):
                self._cta.reads.pending.remove(read)
        counters = self._cta.machine.counters
        counters.wgmma += len(chain)
        counters.wgmma_flops += shape.flops * len(chain)

    def _read_a(self, chain: list[WgmmaOp]) -> NDArray[np.float32]:
        first = chain[0]
        if first.a_registers is not None:
            registers = [op.a_registers for op in chain if op.a_registers is not None]
            return fragment_a(np.concatenate(registers), first.shape.a_type)
        descriptors = [op.a_descriptor for op in chain]
        shape = first.shape
        return read_operand(
            self._cta.shared, descriptors, _TILE_M, shape.k, shape.a_type, first.a_mn_major
        )

    def _accumulate(self, op: WgmmaOp, a: Any, b: Any) -> None:
        bank = self._cta.registers.banks["u"]
        kind: Any = {"f32": np.float32, "s32": np.int32, "f16": np.uint32}[op.shape.d_type]
        rows = op.d_rows
        lo, count = int(rows[0]), len(rows)
        contiguous = bool((rows == np.arange(lo, lo + count)).all())
        where: Any = slice(lo, lo + count) if contiguous else rows
        registers = bank[where, self._threads].view(kind)
        function = accumulate_half if op.shape.d_type == "f16" else accumulate
        function(registers, a, b, overwrite=op.overwrite)
        if not contiguous:
            bank[rows, self._threads] = registers.view(np.uint32)


_granules: dict[Any, NDArray[np.int64]] = {}


def operand_granules(op: WgmmaOp) -> list[tuple[int | None, NDArray[np.int64]]]:
    """Shared addresses of the 16-byte pieces that an operation reads.

    Each with the warp of the warpgroup that alone reads it, None where all four do: a warp needs
    its own 16 rows of A and all of B.
    """
    shape = op.shape
    operands: list[Any] = [
        (None, slice(None), op.b_descriptor, shape.n, shape.b_type, op.b_mn_major)
    ]
    if op.a_registers is None:
        operands += [
            (w, slice(16 * w, 16 * w + 16), op.a_descriptor, _TILE_M, shape.a_type, op.a_mn_major)
            for w in range(4)
        ]
    result: list[tuple[int | None, NDArray[np.int64]]] = []
    for warp, part, descriptor, rows, kind, mn_major in operands:
        key = (warp, descriptor, rows, shape.k, kind, mn_major)
        found = _granules.get(key)
        if found is None:
            offsets = operand_offsets(
                decode_smem_descriptor(descriptor), rows, shape.k, ITEMSIZE[kind], mn_major
            )
            found = _granules[key] = np.unique(offsets[part] & ~15)
        result.append((warp, found))
    return result
