"""Nsight Systems: its command line, and passes from its tables."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hopperflash.errors import InvalidArgument
from hopperflash.profiler import nsys, tools
from hopperflash.profiler.nsys import Operation, Range, passes, read

RECORDED = Path(__file__).parent / "recorded"
REPORT = RECORDED / "trace.nsys-rep"


def test_passes_are_medians_over_their_calls():
    forward, backward = read(REPORT)
    assert (forward.name, forward.calls, backward.name, backward.calls) == (
        "forward",
        2,
        "backward",
        2,
    )
    assert (forward.host, forward.span, forward.busy, forward.gaps) == (6500, 9200, 9200, 0)
    (kernel,) = forward.kernels
    assert (kernel.launches, kernel.nanoseconds) == (1, 9200)
    assert backward.host == 20000
    # 500 + 2000 in the first, whose last kernel begins early; 200 + 1000 + 1000 in the second.
    assert backward.gaps == (2500 + 2200) / 2
    assert backward.longest_gap == (2000 + 1000) / 2
    assert backward.busy == (19500 + 20800) / 2


def test_copies_and_fills_take_time_and_are_no_kernels():
    _, backward = read(REPORT)
    assert [kernel.name.split("_")[2] for kernel in backward.kernels] == [
        "preprocess",
        "sm90",
        "postprocess",
    ]


def test_overlapping_kernels_leave_no_gap():
    operations = [Operation("a", 0, 10, True), Operation("b", 4, 2, True)]
    operations.append(Operation("c", 12, 3, True))
    (found,) = passes(operations, [Range("forward", 0, 15, 7)])
    assert (found.gaps, found.busy) == (2, 13)


def test_only_what_runs_in_a_range_is_its_own():
    operations = [Operation("before", 0, 5, True), Operation("in", 5, 5, True)]
    (found,) = passes(operations, [Range("forward", 5, 5, 1)])
    assert [kernel.name for kernel in found.kernels] == ["in"]


def test_a_trace_without_our_ranges_is_refused(tmp_path):
    for path in RECORDED.glob("trace_*.csv"):
        (tmp_path / path.name).write_text(path.read_text().replace("hopperflash ", "mine "))
    with pytest.raises(InvalidArgument, match="holds no pass"):
        read(tmp_path / "trace.nsys-rep")


def test_notices_domains_and_ranges_without_work_are_read_over():
    operations, ranges = (path.read_text() for path in nsys.tables(REPORT))
    notice = "\nNOTICE: Existing SQLite export found\n\nProcessing [x.sqlite]... \n"
    idle = "hopperflash backward,,,130000,500,PushPop,42,42,0,0,0,9,,:9\n"
    ranges = ranges.replace("\nhopperflash", "\nlibrary:hopperflash") + idle
    found = passes(nsys.parse_operations(notice + operations), nsys.parse_ranges(notice + ranges))
    assert found == read(REPORT)


def test_without_nsys_its_tables_are_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(tools, "find", lambda tool: None)
    report = tmp_path / "trace.nsys-rep"
    report.touch()
    with pytest.raises(InvalidArgument) as refused:
        read(report)
    assert "install nsight-systems" in refused.value.reasons[0]
    assert "trace_cuda_gpu_trace.csv" in refused.value.reasons[1]


def test_tables_older_than_the_report_are_written_anew(tmp_path, monkeypatch):
    tool = tmp_path / "nsys"
    tool.write_text(f"#!/bin/sh\ncp {RECORDED}/trace_*.csv {tmp_path}\n")
    tool.chmod(0o755)
    monkeypatch.setattr(tools, "find", lambda name: str(tool))
    report = tmp_path / "trace.nsys-rep"
    report.touch()
    for path in nsys.tables(report):
        path.write_text("")
        os.utime(path, (1, 1))
    assert read(report) == read(REPORT)


def test_the_passes_alone_are_traced():
    words = nsys.command(("python", "x.py"), Path("y.nsys-rep")).words
    assert words[-3:] == ("--output=y.nsys-rep", "python", "x.py")
    assert {"--trace=cuda,nvtx", "--capture-range=cudaProfilerApi"} < set(words)
