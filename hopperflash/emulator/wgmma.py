"""wgmma: matrix descriptors, operands in shared memory, and accumulation into registers."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from .element_types import ITEMSIZE, STORAGE, Float32, from_float32, to_float32
from .errors import InvalidDescriptor
from .fragments import (
    Registers,
    pack_accumulator,
    pack_half_accumulator,
    unpack_half_accumulator,
)
from .swizzle import (
    GRANULE,
    PATTERN_BYTES,
    Indices,
    as_granules,
    swizzle_addresses,
)

_SHAPE = re.compile(
    r"wgmma\.mma_async(?:\.sp)?\.sync\.aligned\.m64n(\d+)k(\d+)\.(\w+)\.(\w+)\.(\w+)(\.satfinite)?"
)
_FAMILY = {
    "f16": "f16", "bf16": "bf16", "tf32": "tf32", "e4m3": "fp8", "e5m2": "fp8",
    "s8": "int8", "u8": "int8",
}  # fmt: skip
_ACCUMULATORS = {
    "f16": ("f32", "f16"), "bf16": ("f32",), "tf32": ("f32",), "fp8": ("f32", "f16"),
    "int8": ("s32",),
}  # fmt: skip
_TILE_M = 64
_LAYOUT_SPANS = (0, 128, 64, 32)


class SharedWindow(Protocol):
    """Shared memory of a CTA: its bytes and the window address of the first."""

    base: int
    data: NDArray[np.uint8]


@dataclass(frozen=True)
class WgmmaShape:
    """Extents and element types of a wgmma instruction; m is 64."""

    n: int
    k: int
    a_type: str
    b_type: str
    d_type: str
    saturates: bool = False

    @staticmethod
    @lru_cache(maxsize=1024)
    def parse(opcode: str) -> "WgmmaShape":
        """Reads `wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16`."""
        match = _SHAPE.match(opcode)
        if match is None or ".sp" in opcode:
            raise InvalidDescriptor(f"not a dense wgmma: {opcode}")
        n, k = int(match[1]), int(match[2])
        d_type, a_type, b_type = match.group(3, 4, 5)
        family = _FAMILY.get(a_type, "")
        if (
            family != _FAMILY.get(b_type)
            or d_type not in _ACCUMULATORS.get(family, ())
            or n % (16 if family == "int8" and n > 32 else 8)
            or not 8 <= n <= 256
            or k * ITEMSIZE[a_type] != 32
            or (match[6] is not None and family != "int8")
        ):
            raise InvalidDescriptor(f"wgmma shape or types are not emulated: {opcode}")
        return WgmmaShape(n, k, a_type, b_type, d_type, match[6] is not None)

    @property
    def registers(self) -> int:
        """32-bit registers of the accumulator in each thread."""
        return self.n // 4 if self.d_type == "f16" else self.n // 2

    @property
    def name(self) -> str:
        """As the opcode spells it."""
        return f"m64n{self.n}k{self.k}.{self.d_type}.{self.a_type}.{self.b_type}"

    @property
    def flops(self) -> int:
        """Multiplications and additions of one instruction."""
        return 2 * 64 * self.n * self.k


class SmemDescriptor(NamedTuple):
    """A decoded matrix descriptor; addresses and offsets in bytes."""

    start: int
    lbo: int
    sbo: int
    base_offset: int
    swizzle: int

    @property
    def row(self) -> int:
        """The row of its swizzle pattern that it starts in: 0, without a base offset."""
        return self.start % (8 * self.swizzle) // self.swizzle if self.swizzle else 0


@lru_cache(maxsize=65536)
def decode_smem_descriptor(desc: int) -> SmemDescriptor:
    """Fields of a 64-bit matrix descriptor."""
    decoded = SmemDescriptor(
        start=(desc & 0x3FFF) << 4,
        lbo=((desc >> 16) & 0x3FFF) << 4,
        sbo=((desc >> 32) & 0x3FFF) << 4,
        base_offset=(desc >> 49) & 7,
        swizzle=_LAYOUT_SPANS[(desc >> 62) & 3],
    )
    if decoded.base_offset:
        raise InvalidDescriptor(f"base offset {decoded.base_offset} is not emulated: {desc:#x}")
    return decoded


def operand_offsets(
    desc: SmemDescriptor, rows: int, k: int, itemsize: int, mn_major: bool
) -> Indices:
    """Shared addresses [rows, k] of an operand's elements; `rows` is its M or N extent."""
    granules = _granule_addresses(desc, rows, k, itemsize, mn_major)
    per_granule = GRANULE // itemsize
    within = itemsize * np.arange(per_granule, dtype=np.int64)
    addresses = granules[:, :, None] + within
    addresses = addresses.reshape(granules.shape[0], -1)
    return addresses.T if mn_major else addresses


def _granule_addresses(
    desc: SmemDescriptor, rows: int, k: int, itemsize: int, mn_major: bool
) -> Indices:
    """Addresses of the 16-byte pieces: [rows, k pieces], or [k, row pieces] where MN-major."""
    elements = GRANULE // itemsize
    if mn_major and itemsize != 2:
        raise InvalidDescriptor(f"MN-major operands have 16-bit elements, not {8 * itemsize}-bit")
    width = max(desc.swizzle // GRANULE, 1)
    if mn_major:
        along_k = np.arange(k)[:, None]
        piece = np.arange(rows // elements)
        if desc.swizzle:
            logical = (piece % width) * GRANULE + (piece // width) * desc.lbo
            logical = logical + (along_k % 8) * GRANULE * width + (along_k // 8) * desc.sbo
        else:
            logical = piece * desc.sbo + (along_k % 8) * GRANULE + (along_k // 8) * desc.lbo
    else:
        row = np.arange(rows)[:, None]
        piece = np.arange(k // elements)
        step = GRANULE if desc.swizzle else desc.lbo
        logical = (row % 8) * GRANULE * width + (row // 8) * desc.sbo + piece * step
    return swizzle_addresses(desc.start + logical.astype(np.int64), desc.swizzle)


class _Layout(NamedTuple):
    """What fixes the relative addresses of an operand; the key of the index cache."""

    starts: tuple[int, ...]
    lbo: int
    sbo: int
    swizzle: int
    rows: int
    k: int
    itemsize: int
    mn_major: bool


@lru_cache(maxsize=1024)
def _granule_indices(layout: _Layout) -> tuple[Indices, int, int]:
    """Relative granule indices with their extremes."""
    parts = [
        _granule_addresses(
            SmemDescriptor(start, layout.lbo, layout.sbo, 0, layout.swizzle),
            layout.rows,
            layout.k,
            layout.itemsize,
            layout.mn_major,
        )
        for start in layout.starts
    ]
    indices = np.concatenate(parts, axis=0 if layout.mn_major else 1) // GRANULE
    return indices, int(indices.min()), int(indices.max())


def operand_bits(
    shared: SharedWindow,
    descriptors: Sequence[int],
    rows: int,
    k: int,
    itemsize: int,
    mn_major: bool,
) -> NDArray[Any]:
    """Raw elements [rows, k * len(descriptors)] of consecutive k-steps of one operand."""
    decoded = [decode_smem_descriptor(desc) for desc in descriptors]
    first = decoded[0]
    if any(other[1:] != first[1:] for other in decoded):
        raise InvalidDescriptor(f"chained descriptors differ in layout: {decoded}")
    origin = min(desc.start for desc in decoded) // PATTERN_BYTES * PATTERN_BYTES
    starts = tuple(desc.start - origin for desc in decoded)
    layout = _Layout(starts, first.lbo, first.sbo, first.swizzle, rows, k, itemsize, mn_major)
    indices, lowest, highest = _granule_indices(layout)
    shift = (origin - shared.base) // GRANULE
    granules = as_granules(shared.data)
    if lowest + shift < 0 or highest + shift >= granules.size:
        raise InvalidDescriptor(
            f"operand {first} leaves shared memory: {shared.data.size} bytes from {shared.base:#x}"
        )
    elements: NDArray[Any] = granules[indices + shift].view(STORAGE[itemsize])
    return elements.T if mn_major else elements


def read_operand(
    shared: SharedWindow,
    parts: Sequence[Sequence[int]],
    rows: int,
    k: int,
    dtype: str,
    mn_major: bool,
) -> Float32:
    """An operand in float32, [rows * len(parts), k * steps]: one descriptor per part and k-step."""
    pieces = [operand_bits(shared, d, rows, k, ITEMSIZE[dtype], mn_major) for d in parts]
    bits = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
    if mn_major:
        values: Float32 = to_float32(bits.T, dtype).T
        return values
    return to_float32(bits, dtype)


def _product(a: Float32, b: Float32) -> Float32:
    """a @ b.T by 64 rows: BLAS rounds otherwise for other sizes, and schedules must agree."""
    product: Float32 = np.matmul(a.reshape(-1, _TILE_M, a.shape[1]), b.T)
    return product.reshape(a.shape[0], -1)


def accumulate(
    registers: NDArray[Any],
    a: Float32,
    b: Float32,
    *,
    overwrite: bool = False,
) -> None:
    """Adds a @ b.T to accumulator registers in place, or replaces them (scale-d false).

    `registers` is float32 [n/2, 32*warps]; a is [16*warps, k], b is [n, k].
    """
    packed = pack_accumulator(_product(a, b))
    if overwrite:
        registers[...] = packed
    else:
        registers += packed


def accumulate_integers(
    registers: NDArray[np.int32], a: Float32, b: Float32, *, overwrite: bool = False,
    saturates: bool = False,
) -> None:  # fmt: skip
    """As `accumulate` for int32 accumulators, which wrap around or saturate."""
    # float64 keeps every integer sum exact.
    total = pack_accumulator(a.astype(np.float64) @ b.T.astype(np.float64)).astype(np.int64)
    if not overwrite:
        total += registers
    if saturates:
        info = np.iinfo(np.int32)
        total = total.clip(info.min, info.max)
    registers[...] = total


def accumulate_half(
    registers: Registers, a: Float32, b: Float32, *, overwrite: bool = False
) -> None:
    """As `accumulate` for float16 accumulators, two columns per register [n/4, 32*warps]."""
    total = _product(a, b)
    if not overwrite:
        total += to_float32(unpack_half_accumulator(registers), "f16")
    registers[...] = pack_half_accumulator(from_float32(total, "f16"))
