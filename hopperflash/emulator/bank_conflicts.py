"""Shared-memory bank conflicts: the wavefronts that an access needs beyond the fewest."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_BANKS = 32
_WORD = 4
_ROW = _BANKS * _WORD
_MAX_CACHED = 1 << 14
_cache: dict[tuple[int, bytes, bytes], int] = {}


def extra_wavefronts(addresses: NDArray[np.int64], threads: NDArray[Any], nbytes: int) -> int:
    """Wavefronts beyond one for each part of a warp that could be served at once.

    A warp's access of 4 bytes a lane is one part, of 8 bytes two (half-warps), of 16 bytes four.
    The parts of ldmatrix and stmatrix are its matrices: 16 bytes from the 8 lanes of each.

    Args:
        addresses: shared addresses of the active lanes.
        threads: their thread numbers in the CTA.
        nbytes: bytes of each lane.
    """
    origin = int(addresses[0]) // _ROW * _ROW
    relative = addresses - origin
    key = (nbytes, relative.tobytes(), threads.tobytes())
    found = _cache.get(key)
    if found is None:
        if len(_cache) >= _MAX_CACHED:
            _cache.clear()
        found = _cache[key] = _count(relative, threads, nbytes)
    return found


def _count(addresses: NDArray[np.int64], threads: NDArray[Any], nbytes: int) -> int:
    words = max(nbytes // _WORD, 1)
    part = threads.astype(np.int64) * words // 32
    word = addresses[:, None] // _WORD + np.arange(words)
    lowest = int(word.min())
    span = int(word.max()) - lowest + 1
    distinct = np.unique((part[:, None] * span + (word - lowest)).ravel())
    parts, words_read = distinct // span, distinct % span + lowest
    loads = np.bincount((parts - parts.min()) * _BANKS + words_read % _BANKS)
    per_part = np.append(loads, np.zeros(-len(loads) % _BANKS, loads.dtype)).reshape(-1, _BANKS)
    return int(np.maximum(per_part.max(axis=1) - 1, 0).sum())
