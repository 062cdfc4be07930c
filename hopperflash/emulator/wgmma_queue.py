"""wgmma operations of one warpgroup between issue and wait."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .element_types import ITEMSIZE
from .errors import InvalidDescriptor
from .fragments import fragment_a
from .memory import SHARED_BASE
from .ptx_ir import Instruction
from .swizzle import GRANULE
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

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Of the operands in shared memory."""
        if self.a_registers is None:
            return self.a_descriptor, self.b_descriptor
        return (self.b_descriptor,)

    def continues(self, other: WgmmaOp) -> bool:
        """Can this operation be computed together with the one before it?"""
        return (
            not self.overwrite
            and self.shape.d_type == "f32"
            and self._is_like(other)
            and _same_layout(self.b_descriptor, other.b_descriptor)
        )

    def parallels(self, other: WgmmaOp) -> bool:
        """Does it multiply other rows of A by the same B, into the same registers?"""
        return (
            self.overwrite == other.overwrite
            and self.b_descriptor == other.b_descriptor
            and self._is_like(other)
        )

    def _is_like(self, other: WgmmaOp) -> bool:
        return (
            self.shape is other.shape
            and (self.d_rows is other.d_rows or np.array_equal(self.d_rows, other.d_rows))
            and (self.a_registers is None) == (other.a_registers is None)
            and self.negate == other.negate
            and self.a_mn_major == other.a_mn_major
            and self.b_mn_major == other.b_mn_major
            and (self.a_registers is not None
                 or _same_layout(self.a_descriptor, other.a_descriptor))
        )  # fmt: skip


Chain = list[WgmmaOp]
"""Operations of a warpgroup that are one product, longer along K."""


def _same_layout(a: int, b: int) -> bool:
    # All but the start address.
    return a >> 16 == b >> 16


class WgmmaQueue:
    """In-order queue of a warpgroup: open operations and committed groups."""

    def __init__(self, cta: Any, group: int) -> None:
        self.cta = cta
        self.threads = slice(128 * group, 128 * group + 128)
        self._open: list[WgmmaOp] = []
        self._groups: deque[list[WgmmaOp]] = deque()
        self._executed: set[int] = set()
        """By id, of operations that are in a group and completed early."""
        self._group = group
        self._clock = 1
        self._completed = 0
        self.in_flight = 0
        """Bit mask of accumulator rows that must not be touched."""
        self.fragments = 0
        """Bit mask of the A operand's rows, which must not be written."""

    def issue(self, op: WgmmaOp) -> None:
        for descriptor in map(decode_smem_descriptor, op.descriptors):
            if descriptor.row:
                self.cta.machine.hazards.report(
                    "matrix descriptor misaligned", op.ins, self.cta,
                    f"shared {descriptor.start:#x} is in row {descriptor.row} of its "
                    f"{8 * descriptor.swizzle}-byte pattern, with base offset 0",
                )  # fmt: skip
        self.in_flight |= op.d_mask
        self.fragments |= op.a_mask
        if self.cta.machine.full_checks:
            a, b, every = operand_granules(op)
            if every[0] < 0 or every[-1] >= self.cta.shared.data.size // GRANULE:
                raise InvalidDescriptor(
                    f"operand leaves shared memory: {SHARED_BASE + GRANULE * every[0]:#x} to "
                    f"{SHARED_BASE + GRANULE * (every[-1] + 1):#x}"
                )
            self.cta.order.wgmma(self._group, self._clock, op.ins, a, b, every)
        self._open.append(op)

    def commit(self) -> None:
        """Closes the open group."""
        self._groups.append(self._open)
        self._open = []
        self._clock += 1

    def complete_early(self) -> None:
        """The committed groups complete now, before anybody waits."""
        complete([self], [self.committed()])

    def committed(self) -> list[WgmmaOp]:
        return [op for group in self._groups for op in group]

    def take(self, newest: int) -> list[WgmmaOp]:
        """Operations of all but the `newest` committed groups, which a wait completes."""
        done: list[WgmmaOp] = []
        while len(self._groups) > newest:
            done += self._groups.popleft()
            self._completed += 1
        return done

    def waited(self, done: list[WgmmaOp]) -> None:
        """These operations, taken before, have completed."""
        self._executed.difference_update(id(op) for op in done)
        self.in_flight = self.fragments = 0
        for op in self.outstanding():
            self.in_flight |= op.d_mask
            self.fragments |= op.a_mask
        self.cta.order.wgmma_done(self._group, self._completed)

    def outstanding(self) -> list[WgmmaOp]:
        return [*self.committed(), *self._open]

    def chains(self, ops: list[WgmmaOp]) -> list[Chain]:
        """Those operations that have not completed early; they count as completed from now on."""
        chains: list[Chain] = []
        for op in ops:
            if id(op) in self._executed:
                continue
            self._executed.add(id(op))
            if chains and op.continues(chains[-1][-1]):
                chains[-1].append(op)
            else:
                chains.append([op])
        return chains


def complete(queues: list[WgmmaQueue], ops: list[list[WgmmaOp]]) -> None:
    """Executes operations of neighbouring warpgroups; what they do in parallel is one product."""
    chains = [queue.chains(part) for queue, part in zip(queues, ops, strict=True)]
    cta, first = queues[0].cta, queues[0].threads.start
    if all(_parallel(chains[0], other) for other in chains[1:]):
        threads = slice(first, queues[-1].threads.stop)
        for together in zip(*chains, strict=True):
            _multiply(cta, threads, together, {})
        return
    operands: dict[Any, Any] = {}
    for queue, part in zip(queues, chains, strict=True):
        for chain in part:
            _multiply(cta, queue.threads, (chain,), operands)


def _parallel(a: list[Chain], b: list[Chain]) -> bool:
    return len(a) == len(b) and all(
        len(x) == len(y) and all(p.parallels(q) for p, q in zip(x, y, strict=True))
        for x, y in zip(a, b, strict=True)
    )


def _multiply(
    cta: Any, threads: slice, chains: tuple[Chain, ...], operands: dict[Any, Any]
) -> None:
    """One product of warpgroups with the same B; `operands` keeps converted B tiles."""
    first = chains[0][0]
    shape = first.shape
    key = (tuple(op.b_descriptor for op in chains[0]), shape, first.b_mn_major)
    b = operands.get(key)
    if b is None:
        b = operands[key] = read_operand(
            cta.shared, [key[0]], shape.n, shape.k, shape.b_type, first.b_mn_major
        )
    a = _read_a(cta, chains)
    if first.negate:
        a = -a
    _accumulate(cta, threads, first, a, b)
    counters, count = cta.machine.counters, sum(map(len, chains))
    counters.wgmma += count
    counters.wgmma_flops += shape.flops * count
    counters.count_shape("wgmma", shape.name, count, shape.flops)


def _read_a(cta: Any, chains: tuple[Chain, ...]) -> NDArray[np.float32]:
    first = chains[0][0]
    shape = first.shape
    if first.a_registers is not None:
        registers = [
            np.concatenate([op.a_registers for op in chain if op.a_registers is not None])
            for chain in chains
        ]
        joined = registers[0] if len(chains) == 1 else np.concatenate(registers, axis=1)
        return fragment_a(joined, shape.a_type)
    descriptors = [[op.a_descriptor for op in chain] for chain in chains]
    return read_operand(
        cta.shared, descriptors, _TILE_M, shape.k, shape.a_type, first.a_mn_major
    )  # fmt: skip


def _accumulate(cta: Any, threads: slice, op: WgmmaOp, a: Any, b: Any) -> None:
    bank = cta.registers.banks["u"]
    kind: Any = {"f32": np.float32, "s32": np.int32, "f16": np.uint32}[op.shape.d_type]
    rows = op.d_rows
    lo, count = int(rows[0]), len(rows)
    contiguous = bool((rows == np.arange(lo, lo + count)).all())
    where: Any = slice(lo, lo + count) if contiguous else rows
    registers = bank[where, threads].view(kind)
    if op.shape.d_type == "s32":
        accumulate_integers(registers, a, b, overwrite=op.overwrite, saturates=op.shape.saturates)
    else:
        function = accumulate_half if op.shape.d_type == "f16" else accumulate
        function(registers, a, b, overwrite=op.overwrite)
    if not contiguous:
        bank[rows, threads] = registers.view(np.uint32)


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
