"""The 128-byte descriptors of TMA, as compiled host code builds them."""

from __future__ import annotations

import struct
from collections.abc import Sequence

TYPE_CODES = {
    "u8": 0, "u16": 1, "u32": 2, "s32": 3, "u64": 4, "s64": 5, "f16": 6, "f32": 7, "f64": 9,
    "bf16": 10,
}  # fmt: skip


def encode(
    address: int, kind: str, dims: Sequence[int], strides: Sequence[int], box: Sequence[int],
    swizzle: int,
) -> bytes:  # fmt: skip
    """The descriptor that CuTe DSL host code builds; `strides` in bytes, from dimension 1."""
    rank = len(dims)
    control = 2 | (rank - 1) << 4 | TYPE_CODES[kind] << 7 | (0, 32, 64, 128).index(swizzle) << 13
    sizes = [size - 1 for size in dims] + [0] * (5 - rank)
    words = [stride >> 4 for stride in strides] + [0] * (5 - rank)
    high = sum((word >> 32) << (4 * i) for i, word in enumerate(words))
    low = [word & 0xFFFFFFFF for word in words]
    raw = struct.pack("<QI4II5I", address, control | 2 << 17, *low, high, *sizes)
    raw += bytes(3) + bytes([extent - 1 for extent in box] + [0] * (5 - rank))
    return raw.ljust(64, b"\0") + b"\xaa" * 64
