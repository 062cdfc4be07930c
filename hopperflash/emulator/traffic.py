"""Which bytes of global memory a launch touches: what it has to move at least once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

_MARKED: dict[int, Any] = {
    1: np.uint8(1), 2: np.uint16(0x0101), 4: np.uint32(0x01010101),
    8: np.uint64(0x0101010101010101),
}  # fmt: skip
_LARGE = 1 << 28  # bytes


class TouchedBytes:
    """One mark per byte of each region of memory, made when the region is first touched."""

    def __init__(self) -> None:
        self._marks: dict[tuple[int, int], NDArray[np.uint8]] = {}
        self._sparse: dict[int, list[NDArray[np.int64]]] = {}
        """Of regions too large to look through: the addresses, by size of item."""

    def _of(self, start: int, end: int) -> NDArray[np.uint8]:
        marks = self._marks.get((start, end))
        if marks is None:
            # Typed views need whole items.
            marks = self._marks[start, end] = np.zeros((end - start + 15) // 16 * 16, np.uint8)
        return marks

    def items(self, start: int, end: int, index: NDArray[np.int64], itemsize: int) -> None:
        """Items of a region [start, end), counted in items from its start."""
        if end - start > _LARGE:
            self._sparse.setdefault(itemsize, []).append(start + index.reshape(-1) * itemsize)
            return
        mark = _MARKED[itemsize]
        self._of(start, end).view(mark.dtype)[index] = mark

    def box(self, start: int, end: int, offset: int, shape: Sequence[int],
            strides: Sequence[int], itemsize: int) -> None:  # fmt: skip
        """A box of items at a byte offset of a region."""
        if end - start > _LARGE:
            at = start + box_offsets(offset, shape, strides)
            self._sparse.setdefault(itemsize, []).append(at)
            return
        mark = _MARKED[itemsize]
        marks: NDArray[Any] = np.ndarray(
            shape, mark.dtype, buffer=self._of(start, end), offset=offset, strides=strides
        )
        marks[...] = mark

    def meets(self, addresses: NDArray[np.int64], itemsize: int) -> bool:
        """Whether an item at one of these addresses begins in a touched byte, or ends in one."""
        for (start, _), marks in self._marks.items():
            for at in (addresses - start, addresses - start + itemsize - 1):
                inside = at[(at >= 0) & (at < len(marks))]
                if marks[inside].any():
                    return True
        touched = self._sparse_bytes()
        return bool(np.isin(addresses, touched).any())

    def count(self) -> int:
        """Bytes touched at least once."""
        dense = sum(int(np.count_nonzero(marks)) for marks in self._marks.values())
        return dense + self._sparse_bytes().size

    def _sparse_bytes(self) -> NDArray[np.int64]:
        """Addresses of touched bytes in large regions, each once."""
        parts = [
            (np.concatenate(found)[:, None] + np.arange(itemsize)).reshape(-1)
            for itemsize, found in self._sparse.items()
        ]
        return np.unique(np.concatenate(parts)) if parts else np.zeros(0, np.int64)


def box_offsets(offset: int, shape: Sequence[int], strides: Sequence[int]) -> NDArray[np.int64]:
    """Byte offsets of all items of a box."""
    at = np.zeros(tuple(shape), np.int64) + offset
    for axis, (count, stride) in enumerate(zip(shape, strides, strict=True)):
        along = [1] * len(shape)
        along[axis] = count
        at += (np.arange(count) * stride).reshape(along)
    return at.reshape(-1)
