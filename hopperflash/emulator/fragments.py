"""Register fragments of tensor-core instructions as plain matrices, and rows of ldmatrix.

Register arrays have one row per register and one column per lane; several warps lie side by side,
so a warpgroup has 128 columns. In a warp, lane 4*g + t belongs to group g and is its thread t.
wgmma and mma.sync share these layouts: a warp owns 16 rows.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .element_types import ITEMSIZE, STORAGE, Float32, to_float32

Registers = NDArray[np.uint32]

GROUPS, THREADS = 8, 4
WARP = GROUPS * THREADS


def pack_accumulator(matrix: NDArray[Any]) -> NDArray[Any]:
    """Accumulator registers [n/2, 32*warps] that hold a [16*warps, n] matrix."""
    rows, n = matrix.shape
    split = matrix.reshape(rows // 16, 2, GROUPS, n // 8, THREADS, 2)
    registers: NDArray[Any] = split.transpose(3, 1, 5, 0, 2, 4).reshape(n // 2, rows * 2)
    return registers


def unpack_accumulator(registers: NDArray[Any]) -> NDArray[Any]:
    """The [16*warps, n] matrix in accumulator registers [n/2, 32*warps]."""
    count, lanes = registers.shape
    split = registers.reshape(count // 4, 2, 2, lanes // WARP, GROUPS, THREADS)
    matrix: NDArray[Any] = split.transpose(3, 1, 4, 0, 5, 2).reshape(lanes // 2, count * 2)
    return matrix


def pack_half_accumulator(matrix: NDArray[np.uint16]) -> Registers:
    """Registers [n/4, 32*warps] of a 16-bit accumulator: two neighbouring columns in each."""
    words = np.ascontiguousarray(matrix).view(np.uint32)
    rows, pairs = words.shape
    split = words.reshape(rows // 16, 2, GROUPS, pairs // 4, THREADS)
    registers: Registers = split.transpose(3, 1, 0, 2, 4).reshape(pairs // 2, rows * 2)
    return registers


def unpack_half_accumulator(registers: Registers) -> NDArray[np.uint16]:
    """The 16-bit matrix [16*warps, n] in packed accumulator registers [n/4, 32*warps]."""
    count, lanes = registers.shape
    split = registers.reshape(count // 2, 2, lanes // WARP, GROUPS, THREADS)
    words = split.transpose(2, 1, 3, 0, 4).reshape(lanes // 2, count * 2)
    return np.ascontiguousarray(words).view(np.uint16)


def fragment_a(registers: Registers, dtype: str) -> Float32:
    """The A operand [16*warps, k] in registers [2 or 4 per instruction, 32*warps].

    Registers of several instructions may follow each other: their k extents are joined.
    """
    count, lanes = registers.shape
    per_register = 4 // ITEMSIZE[dtype]
    elements = np.ascontiguousarray(registers).view(STORAGE[ITEMSIZE[dtype]])
    split = elements.reshape(count // 2, 2, lanes // WARP, GROUPS, THREADS, per_register)
    matrix = split.transpose(2, 1, 3, 0, 4, 5).reshape(lanes // 2, -1)
    return to_float32(matrix, dtype)


def fragment_b(registers: Registers, dtype: str) -> Float32:
    """The B operand of mma.sync, [warps, 8 columns, k], in registers [1 or 2, 32*warps]."""
    count, lanes = registers.shape
    per_register = 4 // ITEMSIZE[dtype]
    elements = np.ascontiguousarray(registers).view(STORAGE[ITEMSIZE[dtype]])
    split = elements.reshape(count, lanes // WARP, GROUPS, THREADS, per_register)
    matrix = split.transpose(1, 2, 0, 3, 4).reshape(lanes // WARP, GROUPS, -1)
    return to_float32(matrix, dtype)


def from_rows(rows: Registers, count: int, transposed: bool) -> Registers:
    """Registers [count, 32*warps] that ldmatrix fills from the rows of its 8x8 matrices.

    `rows` is [warps * count * 8, 4]: 16 bytes of 16-bit elements each, matrix by matrix.
    """
    elements = np.ascontiguousarray(rows).view(np.uint16).reshape(-1, count, 8, 8)
    if transposed:
        elements = elements.transpose(0, 1, 3, 2)
    words = np.ascontiguousarray(elements.transpose(1, 0, 2, 3)).view(np.uint32)
    return words.reshape(count, -1)


def to_rows(registers: Registers, transposed: bool) -> Registers:
    """The rows that stmatrix writes: the inverse of `from_rows`."""
    count, lanes = registers.shape
    elements = np.ascontiguousarray(registers).view(np.uint16)
    elements = elements.reshape(count, lanes // WARP, 8, 8).transpose(1, 0, 2, 3)
    if transposed:
        elements = elements.transpose(0, 1, 3, 2)
    return np.ascontiguousarray(elements).view(np.uint32).reshape(-1, 4)
