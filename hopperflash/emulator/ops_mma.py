"""mma.sync m16n8k*: matrix products of one warp, from and to registers."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .decode import Effect, Op, RowOf, effect, unknown
from .element_types import ITEMSIZE, from_float32, to_float32
from .fragments import (
    fragment_a,
    fragment_b,
    pack_accumulator,
    pack_half_accumulator,
    unpack_accumulator,
    unpack_half_accumulator,
)
from .operands import lanes_of, reader
from .ptx_ir import Instruction, Vector

_MMA = re.compile(
    r"mma\.sync\.aligned\.m16n8k(\d+)\.row\.col(\.satfinite)?"
    r"\.(f32|f16|s32)\.(\w+)\.(\w+)\.(f32|f16|s32)$"
)
# The k extents of each pair of input types.
_EXTENTS = {
    "f16": (8, 16), "bf16": (8, 16), "tf32": (4, 8), "s8": (16, 32), "u8": (16, 32),
    "e4m3": (16, 32), "e5m2": (16, 32),
}  # fmt: skip
_FAMILY = {"s8": "int8", "u8": "int8", "e4m3": "fp8", "e5m2": "fp8"}


class MmaShape(NamedTuple):
    """Extents and element types of an mma.sync; m is 16 and n is 8."""

    k: int
    a_type: str
    b_type: str
    d_type: str
    saturates: bool

    @property
    def flops(self) -> int:
        return 2 * 16 * 8 * self.k

    @staticmethod
    def parse(ins: Instruction) -> MmaShape:
        match = _MMA.match(ins.opcode)
        if match is None:
            raise unknown(ins)
        k, saturates = int(match[1]), match[2] is not None
        d_type, a_type, b_type, c_type = match.groups()[2:]
        family = _FAMILY.get(a_type, a_type)
        if family != _FAMILY.get(b_type, b_type) or k not in _EXTENTS.get(a_type, ()):
            raise unknown(ins, "shape or types")
        accumulators = {"int8": ("s32",), "bf16": ("f32",), "tf32": ("f32",)}
        if c_type != d_type or d_type not in accumulators.get(family, ("f32", "f16")):
            raise unknown(ins, "accumulator types")
        return MmaShape(k, a_type, b_type, d_type, saturates)


def decode_mma(ins: Instruction) -> Op:
    """d = a @ b + c with the register fragments of the PTX tables."""
    shape = MmaShape.parse(ins)
    d, a, b, c = ins.operands
    expected = (
        2 if shape.d_type == "f16" else 4,
        16 * shape.k * ITEMSIZE[shape.a_type] // 128,
        8 * shape.k * ITEMSIZE[shape.b_type] // 128,
    )
    counts = tuple(len(o.items) if isinstance(o, Vector) else 0 for o in (d, a, b))
    if counts != expected or not isinstance(c, Vector) or len(c.items) != counts[0]:
        raise unknown(ins, f"{counts} registers, {expected} expected")
    name = ins.opcode.partition("aligned.")[2]

    def make(row: RowOf) -> Effect:
        a_rows, b_rows = [row(r) for r in a.items], [row(r) for r in b.items]
        d_rows = [row(r) for r in d.items]
        view = {"f32": "f", "f16": "u", "s32": "i"}[shape.d_type]
        c_readers = [reader(i, view, row) for i in c.items]

        def run(g: Any, m: Any) -> None:
            left = fragment_a(g.U[a_rows], shape.a_type).reshape(-1, 16, shape.k)
            right = fragment_b(g.U[b_rows], shape.b_type)
            addend = np.stack([lanes_of(r(g), g) for r in c_readers])
            registers = _multiply(shape, left, right, addend)
            for r, values in zip(d_rows, registers, strict=True):
                g.rows[view][r][...] = values
            counters = g.cta.machine.counters
            counters.mma += g.n // 32
            counters.mma_flops += shape.flops * (g.n // 32)
            counters.count_shape("mma", name, g.n // 32, shape.flops)

        return run

    return effect(ins, make, writes=(d,), reads=(a, b, c), collective="warp")


def _multiply(
    shape: MmaShape, left: NDArray[np.float32], right: NDArray[np.float32], addend: NDArray[Any]
) -> NDArray[Any]:
    """Result registers; sums are in float32, or exact for integers."""
    if shape.d_type == "s32":
        product = left.astype(np.float64) @ right.transpose(0, 2, 1).astype(np.float64)
        total = product.reshape(-1, 8) + unpack_accumulator(addend)
        return pack_accumulator(_integers(total, shape.saturates))
    product = (left @ right.transpose(0, 2, 1)).reshape(-1, 8)
    if shape.d_type == "f32":
        return pack_accumulator(unpack_accumulator(addend) + product)
    halves = to_float32(unpack_half_accumulator(addend), "f16") + product
    return pack_half_accumulator(from_float32(halves, "f16"))


def _integers(total: NDArray[np.float64], saturates: bool) -> NDArray[np.int32]:
    if saturates:
        info = np.iinfo(np.int32)
        return np.clip(total, info.min, info.max).astype(np.int32)
    wrapped: NDArray[np.int32] = total.astype(np.int64).astype(np.uint32).view(np.int32)
    return wrapped
