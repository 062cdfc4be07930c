"""The shared-memory swizzles of TMA and wgmma, on absolute shared-window addresses."""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

GRANULE = 16
PATTERN_BYTES = 1024  # every swizzle repeats within this many bytes

_XOR_MASK = {0: 0x00, 32: 0x10, 64: 0x30, 128: 0x70}

Indices = NDArray[np.int64]


def swizzle_addresses(addresses: Indices, span: int) -> Indices:
    """Where bytes at logical `addresses` live under the swizzle of `span` bytes (0 for none)."""
    return addresses ^ ((addresses >> 3) & _XOR_MASK[span])


@lru_cache(maxsize=1024)
def swizzled_granules(phase: int, count: int, span: int) -> Indices:
    """Granules, counted from the start of a packed run, that hold its 16-byte pieces in order.

    `phase` is the address of the run modulo `PATTERN_BYTES`, a multiple of 128.
    """
    logical = phase + GRANULE * np.arange(count, dtype=np.int64)
    return (swizzle_addresses(logical, span) - phase) // GRANULE


def as_granules(data: NDArray[np.uint8]) -> NDArray[np.complex128]:
    """The same bytes as an array of 16-byte items: the cheapest type numpy moves whole."""
    return data.view(np.complex128)
