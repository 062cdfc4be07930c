"""The experiment of a stored against a recomputed backward: its parts, its page."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hopperflash.errors import InvalidArgument
from hopperflash.profiler import tools
from profiling import recomputation_bytes, stored_vs_recomputed
from profiling import recomputation_report as report
from profiling.recomputation import BATCH, HEAD_DIM, HEADS, WAYS
from profiling.recomputation_bytes import Counted, dram_bytes, moved_bytes
from profiling.recomputation_report import Circumstances, Measurement, crossover
from profiling.stored_vs_recomputed import EMULATED, LENGTHS, by_the_model, measure

DOCS = Path(__file__).parents[2] / "docs"
RECORDED = Path(__file__).parent / "profiler" / "recorded"
ONE = Measurement(512, "stored", "cpu", 3, 1.0, 100, 10, 10, (0.0, 0.0, 0.0))
HERE = Circumstances("here", 3)


@pytest.mark.parametrize("way", WAYS)
def test_gradients_of_both_ways_are_right(way: str) -> None:
    found = measure(96, way, "cpu", 2, limit=0.5)
    assert found.right
    assert max(found.errors) > 0.0
    assert not replace(found, errors=(0.0, 0.5, 0.0)).right
    assert found.runs >= 2


def test_stored_probabilities_are_in_the_peak() -> None:
    matrix = BATCH * HEADS * 512 * 512 * 2
    found = stored_vs_recomputed._in_a_process(measure, 512, "stored", "cpu", 1, 0.0)
    assert found.peak_bytes > 2 * matrix


def test_calls_end_at_the_limit_and_short_ones_are_repeated(monkeypatch) -> None:
    by_the_clock = stored_vs_recomputed._by_the_clock
    ticks = iter(range(0, 1000, 10))  # a call takes ten seconds
    monkeypatch.setattr(stored_vs_recomputed.time, "perf_counter", lambda: next(ticks))
    assert by_the_clock(lambda: None, 10.0, repeat=3, limit=300.0) == [10.0] * 3
    assert by_the_clock(lambda: None, 10.0, repeat=5, limit=15.0) == [10.0] * 2
    assert by_the_clock(lambda: None, 400.0, repeat=3, limit=300.0) == [400.0]
    tenths = iter(x / 10 for x in range(1000))
    monkeypatch.setattr(stored_vs_recomputed.time, "perf_counter", lambda: next(tenths))
    steady = by_the_clock(lambda: None, 0.1, repeat=3, limit=300.0)
    assert sum(steady) == pytest.approx(stored_vs_recomputed.STEADY, abs=0.11)


def test_a_gpu_is_timed_by_events_behind_an_overwritten_cache(monkeypatch) -> None:
    """`Timer` itself is held to that by tests/unit/cli/test_bench.py."""
    asked: list[Any] = []

    class Timer:
        def __init__(self, device: str) -> None:
            asked.append(device)

        def sample(self, call: Any, cache: str, count: int) -> list[float]:
            asked.extend((cache, len(call())))
            return [3.0, 1.0, 2.0][:count]

    on_cpu = stored_vs_recomputed.Operands.random
    monkeypatch.setattr(stored_vs_recomputed, "Timer", Timer)
    monkeypatch.setattr(stored_vs_recomputed.Operands, "random", lambda n, _: on_cpu(n, "cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    memory = {"reset_peak_memory_stats": None, "max_memory_allocated": 7}
    for name, value in memory.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    found = measure(40, "recomputed", "cuda", 3, limit=0.0)
    assert asked == ["cuda", "cold", 3]
    assert (found.device, found.seconds, found.runs, found.peak_bytes) == ("a GPU", 2.0, 3, 0)


def test_stored_bytes_are_the_materialised_ones() -> None:
    matrix = BATCH * HEADS * 512 * 512 * 2
    rows = BATCH * HEADS * 512 * HEAD_DIM * 2
    assert moved_bytes(512, "stored") == 7 * matrix + 8 * rows
    assert moved_bytes(512, "recomputed") < 7 * matrix


def test_recomputing_has_a_fifth_product() -> None:
    product = 2 * BATCH * HEADS * 512 * 512 * HEAD_DIM
    assert [recomputation_bytes.flops(512, way) for way in WAYS] == [4 * product, 5 * product]


def test_the_floor_is_the_longer_of_two() -> None:
    assert replace(ONE, moved_bytes=3350, flops=1).floor == pytest.approx(1e-9)
    assert replace(ONE, moved_bytes=1, flops=989_000).floor == pytest.approx(1e-9)


def test_dram_bytes_are_those_of_every_launch_whatever_its_name(tmp_path: Path) -> None:
    text = (RECORDED / "ncu_raw.csv").read_text()
    other = tmp_path / "other.csv"
    other.write_text(text.replace("hopperflash_", "gemm_"))
    read = 133120 + 131072 + 135168 + 201728
    assert dram_bytes(RECORDED / "ncu_raw.csv") == dram_bytes(other) == read
    other.write_text(text.replace('"dram__bytes_write.sum"', '"dram__bytes_other.sum"'))
    with pytest.raises(InvalidArgument, match="no bytes of DRAM were counted of hopperflash_fwd"):
        dram_bytes(other)


def test_bytes_are_counted_by_nsight_compute(tmp_path, monkeypatch) -> None:
    """The whole way, with a tool that leaves the recorded report where it is told to."""
    tool, log = tmp_path / "ncu", tmp_path / "log"
    tool.write_text(f"""#!{sys.executable}
import sys
from pathlib import Path
recorded, words = Path({str(RECORDED)!r}), sys.argv
if "--export" in words:
    with Path({str(log)!r}).open("a") as log:
        print(*words[1:], file=log)
    report = Path(words[words.index("--export") + 1])
    report.write_text((recorded / "ncu_raw.csv").read_text())
elif "--query-metrics" in words:
    print((recorded / "ncu_metrics.txt").read_text())
else:
    print(Path(words[words.index("--import") + 1]).read_text())
""")
    tool.chmod(0o755)
    monkeypatch.setattr(tools, "find", lambda name: str(tool))
    monkeypatch.setattr(tools, "obstacles", lambda name, counters: [])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    out = tmp_path / "found.json"
    lengths = ("--lengths", "8", "--repeat", "1", "--limit", "0")
    stored_vs_recomputed.main(["--device", "cpu", "--ncu", *lengths, "--json", str(out)])
    assert [one["dram_bytes"] for one in json.loads(out.read_text())] == [601088] * 2
    commands = log.read_text().splitlines()
    for way, command in zip(WAYS, commands, strict=True):
        assert command.endswith(f"-m profiling.recomputation {way} 8")
        assert "--kernel-name" not in command and "--section" not in command
        assert "--cache-control none" in command
        (asked,) = re.findall(r"--metrics (\S+)", command)
        assert [name for name in asked.split(",") if not name.startswith("device__")] == [
            "dram__bytes_read.sum", "dram__bytes_write.sum"
        ]  # fmt: skip


def test_what_keeps_nsight_compute_from_counting_is_told_at_once(monkeypatch, capsys) -> None:
    monkeypatch.setattr(tools, "find", lambda tool: None)
    monkeypatch.setattr(tools, "_no_gpu", lambda: "no GPU to profile: none is here")
    with pytest.raises(SystemExit) as ended:
        stored_vs_recomputed.main(["--device", "cpu", "--ncu"])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert "- no ncu in PATH" in told and "- no GPU to profile" in told


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
    text = "\n".join(report.measured(measured((512, 1, 2), (1024, 4, 2)), HERE))
    assert "| 512 | 1 | 2 | 0.50 |" in text
    assert "| 1,024 | 4 | 2 | 2.00 |" in text
    assert "lower latency from 1,024 on: the crossover is between 512 and that" in text
    assert "lower peak memory at every length of these, so the crossover is below 512" in text
    assert "here; medians of 3 calls or more.\n" in text
    assert "Nsight" not in text


def test_fewer_calls_than_asked_for_are_told() -> None:
    first, *others = measured((512, 1, 2), (4096, 900, 2))
    found = [first, others[0], replace(others[1], runs=1), others[2]]
    told = next(report.measured(found, HERE))
    assert told == "here; medians of 3 calls or more (but stored at 4,096 of 1).\n"


def test_counted_bytes_of_dram_stand_beside_the_model() -> None:
    found = [replace(one, dram_bytes=20, moved_bytes=10**7) for one in measured((512, 1, 2))]
    assert "Nsight Compute" in "\n".join(report.measured(found, HERE))
    found[0] = replace(found[0], dram_bytes=30_000_000)
    assert "| 512 | 30.0 | 0.0 | 1500000.00 | 10.0 | 10.0 | 1.00 |" in report.measured(found, HERE)


def test_the_page_is_the_script_s() -> None:
    """All that no clock decides: words, lengths, every figure of the model, which a run holds
    against the emulator's. If not: `make docs`."""
    text = (DOCS / report.PAGE).read_text()
    found = [by_the_model(seqlen, way) for seqlen in LENGTHS for way in WAYS]
    counts = [Counted.by_the_model(seqlen) for seqlen in EMULATED]
    assert text.startswith(report.INTRO)
    assert text.endswith(report.models(found, recomputation_bytes.least_length(), counts))
    table = text.split("## Measured")[1].split("![")[0]
    rows = re.findall(r"^\| ([\d,]+) (\|.*)$", table, re.MULTILINE)
    assert [int(length.replace(",", "")) for length, _ in rows] == list(LENGTHS)
    for _, cells in rows:
        numbers = [float(cell.replace(",", "")) for cell in cells.strip("| ").split("|")]
        for stored, recomputed, ratio in (numbers[:3], numbers[3:]):
            assert ratio == pytest.approx(stored / recomputed, rel=0.05)
    words = r"^20\d\d-\d\d-\d\d, .*, load [\d.]+ before; .*; medians of \d+ calls or more.*\.$"
    assert re.search(words, table, re.MULTILINE)
    assert table.count("- Recomputing has the lower") == 2


@pytest.mark.parametrize("seqlen", EMULATED)
def test_what_is_counted_is_what_the_table_shows(seqlen: int) -> None:
    counted, rows = Counted.by_the_model(seqlen), -(-seqlen // 128) * 128
    sums = BATCH * HEADS * rows * HEAD_DIM * 4
    assert counted.once - sums == moved_bytes(seqlen, "recomputed")


def test_a_count_beside_the_model_ends_the_run(monkeypatch) -> None:
    off = replace(Counted.by_the_model(64), asked=1)
    monkeypatch.setattr(recomputation_bytes, "emulated", lambda seqlen: off)
    with pytest.raises(SystemExit, match="other bytes than the emulator"):
        stored_vs_recomputed._emulated([64])


def test_refreshing_keeps_what_was_measured(tmp_path: Path) -> None:
    page = DOCS / report.PAGE
    (tmp_path / report.PAGE).write_text(page.read_text().replace("134.2", "0.0"))
    cases = [by_the_model(seqlen, way) for seqlen in LENGTHS for way in WAYS]
    counts = [Counted.by_the_model(seqlen) for seqlen in EMULATED]
    report.refresh(cases, recomputation_bytes.least_length(), counts, tmp_path)
    assert (tmp_path / report.PAGE).read_text() == page.read_text()


def test_the_plot_has_a_line_for_each_way_and_their_ratio() -> None:
    made = report.plot(measured((512, 1, 2), (1024, 4, 2)))
    for text in (made, (DOCS / report.PLOT).read_text()):
        assert text.count("<polyline") == 2 * len(WAYS) + 1
        assert text.count("<svg") == text.count("</svg>") == 4
