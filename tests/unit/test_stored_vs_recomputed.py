"""The experiment of a stored against a recomputed backward: its parts, on short lengths."""

from __future__ import annotations

from dataclasses import replace

import pytest

from profiling import stored_vs_recomputed
from profiling.stored_vs_recomputed import BATCH, HEAD_DIM, HEADS, WAYS, Measurement, crossover

ONE = Measurement(512, "stored", "cpu", 1.0, 100, 10, (0.0, 0.0, 0.0))


@pytest.mark.parametrize("way", WAYS)
def test_gradients_of_both_ways_are_right(way: str) -> None:
    found = stored_vs_recomputed.measure(96, way, "cpu", 1)
    assert found.right
    assert max(found.errors) > 0.0
    assert not replace(found, errors=(0.0, 0.5, 0.0)).right


def test_stored_bytes_are_the_materialised_ones() -> None:
    matrix = BATCH * HEADS * 512 * 512 * 2
    rows = BATCH * HEADS * 512 * HEAD_DIM * 2
    assert stored_vs_recomputed.moved_bytes(512, "stored") == 7 * matrix + 8 * rows
    assert stored_vs_recomputed.moved_bytes(512, "recomputed") < 7 * matrix


def measured(*seconds: tuple[int, float, float]) -> list[Measurement]:
    return [
        replace(ONE, seqlen=seqlen, way=way, seconds=value)
        for seqlen, *values in seconds
        for way, value in zip(WAYS, values, strict=True)
    ]


@pytest.mark.parametrize(
    ("seconds", "length"),
    [
        (((512, 1, 2), (1024, 3, 2), (2048, 9, 2)), 1024),
        (((512, 3, 2), (1024, 1, 2), (2048, 9, 2)), 2048),
        (((512, 3, 2), (1024, 3, 2)), 512),
        (((512, 3, 2), (1024, 1, 2)), None),
    ],
)
def test_crossover_is_where_it_stays_better(seconds, length) -> None:
    assert crossover(measured(*seconds), lambda one: one.seconds) == length


def test_table_has_a_row_for_each_length() -> None:
    text = stored_vs_recomputed.table(measured((512, 1, 2), (1024, 4, 2)))
    assert "| 512 | 1 | 2 | 0.50 |" in text
    assert "| 1,024 | 4 | 2 | 2.00 |" in text
    assert "lower latency from 1,024 on" in text
