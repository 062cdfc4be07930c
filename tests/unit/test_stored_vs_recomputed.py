"""The experiment of a stored against a recomputed backward: its parts, its page."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from profiling import recomputation_report as report
from profiling import stored_vs_recomputed
from profiling.recomputation_report import WAYS, Measurement, crossover
from profiling.stored_vs_recomputed import BATCH, HEAD_DIM, HEADS, LENGTHS

DOCS = Path(__file__).parents[2] / "docs"
ONE = Measurement(512, "stored", "cpu", 1.0, 100, 10, 10, (0.0, 0.0, 0.0))


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


def test_recomputing_has_a_fifth_product() -> None:
    product = 2 * BATCH * HEADS * 512 * 512 * HEAD_DIM
    assert [stored_vs_recomputed.flops(512, way) for way in WAYS] == [4 * product, 5 * product]


def test_the_floor_is_the_longer_of_two() -> None:
    assert replace(ONE, moved_bytes=3350, flops=1).floor == pytest.approx(1e-9)
    assert replace(ONE, moved_bytes=1, flops=989_000).floor == pytest.approx(1e-9)


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


def test_a_table_has_a_row_for_each_length() -> None:
    text = "\n".join(report.measured(measured((512, 1, 2), (1024, 4, 2)), "here"))
    assert "| 512 | 1 | 2 | 0.50 |" in text
    assert "| 1,024 | 4 | 2 | 2.00 |" in text
    assert "lower latency from 1,024 on" in text


def test_the_page_is_the_script_s() -> None:
    """All that no clock decides: words, lengths, every figure of the model. If not: `make docs`."""
    text = (DOCS / report.PAGE).read_text()
    found = [stored_vs_recomputed.by_the_model(seqlen, way) for seqlen in LENGTHS for way in WAYS]
    least = stored_vs_recomputed.least_length()
    assert text.startswith(report.INTRO)
    assert report.MODEL + "\n" + "\n".join(report.modelled(found, least)) in text
    table = text.split("## Measured")[1].split("![")[0]
    rows = re.findall(r"^\| ([\d,]+) (\|.*)$", table, re.MULTILINE)
    assert [int(length.replace(",", "")) for length, _ in rows] == list(LENGTHS)
    for _, cells in rows:
        numbers = [float(cell.replace(",", "")) for cell in cells.strip("| ").split("|")]
        for stored, recomputed, ratio in (numbers[:3], numbers[3:]):
            assert ratio == pytest.approx(stored / recomputed, rel=0.02)
    assert re.search(r"^20\d\d-\d\d-\d\d, .*, load [\d.]+ before, median of \d+\.$", table, re.M)
    assert table.count("- Recomputing has the lower") == 2


def test_refreshing_keeps_what_was_measured(tmp_path: Path) -> None:
    page = DOCS / report.PAGE
    (tmp_path / report.PAGE).write_text(page.read_text().replace("134.2", "0.0"))
    cases = [stored_vs_recomputed.by_the_model(seqlen, way) for seqlen in LENGTHS for way in WAYS]
    report.refresh(cases, stored_vs_recomputed.least_length(), tmp_path)
    assert (tmp_path / report.PAGE).read_text() == page.read_text()


def test_the_plot_has_a_line_for_each_way() -> None:
    made = report.plot(measured((512, 1, 2), (1024, 4, 2)))
    for text in (made, (DOCS / report.PLOT).read_text()):
        assert text.count("<polyline") == 2 * len(WAYS)
        assert text.count("<svg") == text.count("</svg>") == 3
