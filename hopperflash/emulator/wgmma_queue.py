"""wgmma operations of one warpgroup between issue and wait."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .element_types import ITEMSIZE
from .fragments import fragment_a
from .memory import SHARED_BASE
from .ptx_ir import Instruction
from .wgmma import (
    WgmmaShape,
    accumulate,
    accumulate_half,
    accumulate_integers,
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
    a_mask: int
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
        self._group = group
        self._clock = 1
        self._completed = 0
        self.in_flight = 0
        """Bit mask of accumulator rows that must not be touched."""
        self.fragments = 0
        """Bit mask of the A operand's rows, which must not be written."""

    def issue(self, op: WgmmaOp) -> None:
        self.in_flight |= op.d_mask
        self.fragments |= op.a_mask
        if self._cta.machine.full_checks:
            a, b, every = operand_granules(op)
            self._cta.order.wgmma(self._group, self._clock, op.ins, a, b, every)
        self._open.append(op)

    def commit(self) -> None:
        self._groups.append(self._open)
        self._open = []
        self._clock += 1
        self._cta.machine.async_work.start(self._complete_all)

    def _complete_all(self) -> None:
        self._execute([op for group in self._groups for op in group], {})

    def wait(self, newest: int, operands: dict[Any, Any]) -> None:
        """Complete all but the `newest` committed groups; `operands` caches converted tiles."""
        done: list[WgmmaOp] = []
        while len(self._groups) > newest:
            done += self._groups.popleft()
            self._completed += 1
        self._execute(done, operands)
        self._executed.difference_update(id(op) for op in done)
        self.in_flight = self.fragments = 0
        for op in (*(o for group in self._groups for o in group), *self._open):
            self.in_flight |= op.d_mask
            self.fragments |= op.a_mask
        self._cta.order.wgmma_done(self._group, self._completed)

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
        counters = self._cta.machine.counters
        counters.wgmma += len(chain)
        counters.wgmma_flops += shape.flops * len(chain)
        counters.count_shape("wgmma", shape.name, len(chain), shape.flops)

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
        if op.shape.d_type == "s32":
            accumulate_integers(
                registers, a, b, overwrite=op.overwrite, saturates=op.shape.saturates
            )
        else:
            function = accumulate_half if op.shape.d_type == "f16" else accumulate
            function(registers, a, b, overwrite=op.overwrite)
        if not contiguous:
            bank[rows, self._threads] = registers.view(np.uint32)


_operands: dict[Any, tuple[list[NDArray[np.int64]], NDArray[np.int64], NDArray[np.int64]]] = {}


def operand_granules(
    op: WgmmaOp,
) -> tuple[list[NDArray[np.int64]], NDArray[np.int64], NDArray[np.int64]]:
    """Numbers of the 16-byte pieces of shared memory that an operation reads.

    A's by warp of the warpgroup (none where A is in registers), B's, and all of them: a warp
    needs its own 16 rows of A and all of B.
    """
    key = (
        op.shape, op.b_descriptor, op.b_mn_major,
        op.a_registers is None, op.a_descriptor, op.a_mn_major,
    )  # fmt: skip
    found = _operands.get(key)
    if found is None:
        shape, a = op.shape, []
        b = _pieces(op.b_descriptor, slice(None), shape.n, shape.k, shape.b_type, op.b_mn_major)
        if op.a_registers is None:
            a = [
                _pieces(op.a_descriptor, slice(16 * w, 16 * w + 16), _TILE_M, shape.k,
                        shape.a_type, op.a_mn_major)
                for w in range(4)
            ]  # fmt: skip
        found = _operands[key] = (a, b, np.unique(np.concatenate([b, *a])))
    return found


def _pieces(
    descriptor: int, part: slice, rows: int, k: int, kind: str, mn_major: bool
) -> NDArray[np.int64]:
    offsets = operand_offsets(decode_smem_descriptor(descriptor), rows, k, ITEMSIZE[kind], mn_major)
    return np.unique(offsets[part] - SHARED_BASE >> 4)
