"""Named windows and caps, forward and backward; their kernels are compiled for no other cases."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, cycle
from typing import Any

from tests.support.gradient_cases import BackwardCase

# (seqlen_q, seqlen_k): fewer, as many and more queries than keys; a few tiles either way.
LENGTHS = ((130, 333), (257, 257), (333, 130))
# Both bounds, one, none of a row but its diagonal; wider than a tile and than all keys.
WINDOWS = ((70, 20), (64, 127), (100, -1), (-1, 30), (0, 0), (0, -1), (200, 150), (1000, 1000))
CAUSAL_WINDOWS = ((70, -1), (0, 5), (150, 40))


def window_cases() -> Iterator[BackwardCase]:
    """Every window at two of the lengths, with and without causal."""
    lengths, dlse = cycle(LENGTHS), cycle((True, False, False, False))
    for causal, windows in ((False, WINDOWS), (True, CAUSAL_WINDOWS)):
        for window in (*windows, *windows):
            yield _case("window", next(lengths), causal=causal, window=window, dlse=next(dlse))
    yield _case("window", (200, 200), window=(90, 20), heads_q=6, heads_k=2, batch=2)
    yield _case("window", (40, 400), window=(20, 0), deterministic=True)


def softcap_cases() -> Iterator[BackwardCase]:
    """With every mask; scores far below the cap, about as large, and far above."""
    for fields in ({}, {"causal": True}, {"window": (90, 20)}):
        for softcap, lengths in zip((50.0, 1.5, 0.2), LENGTHS, strict=True):
            yield _case("softcap", lengths, softcap=softcap, dlse=softcap > 1.0, **fields)


def wide_cases() -> Iterator[BackwardCase]:
    """Windows at the other head dims, where tiles and operands differ."""
    for head_dims in ((96, 96), (128, 128), (192, 128), (192, 192), (256, 256)):
        for window, softcap in (((100, 30), 0.0), ((64, 0), 2.0)):
            yield _case("wide", (200, 270), head_dims, window=window, softcap=softcap)


def unequal_cases() -> Iterator[BackwardCase]:
    """A V wider than K, under query heads that share both."""
    fields: dict[str, Any] = {"window": (100, 30), "heads_q": 4, "heads_k": 2}
    yield _case("unequal", (130, 200), (64, 128), **fields)


def _case(
    name: str, lengths: tuple[int, int], head_dims: tuple[int, int] = (64, 64), **fields: Any
) -> BackwardCase:
    return BackwardCase(
        name=name,
        seqlen_q=lengths[0],
        seqlen_k=lengths[1],
        head_dim=head_dims[0],
        head_dim_v=head_dims[1],
        **fields,
    )


BAND_CASES: tuple[BackwardCase, ...] = tuple(
    chain(window_cases(), softcap_cases(), wide_cases(), unequal_cases())
)
