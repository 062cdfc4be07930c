"""Nsight Compute: its command line, and what is read from what it prints."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hopperflash import env
from hopperflash.errors import InvalidArgument
from hopperflash.profiler import metrics, ncu, tools
from hopperflash.profiler.ncu import Settings, command, parse, read

RECORDED = Path(__file__).parent / "recorded"
FORWARD, PREPROCESS, BACKWARD, POSTPROCESS = range(4)
TARGET = ("python", "-m", "hopperflash", "profile", "target")


def settings(arch: str = "sm_90a", **changed) -> Settings:
    return Settings(arch, Path("x.ncu-rep"), **changed)


def option(words: tuple[str, ...], name: str) -> str:
    return words[words.index(name) + 1]


def test_launches_are_read_with_their_units():
    launches = parse((RECORDED / "ncu_raw.csv").read_text())
    assert len(launches) == 6
    first = launches[0]
    assert first.name == "hopperflash_fwd_sm90_bfloat16_d64x64_192x128_causal_group2_0"
    assert (first.grid, first.block, first.capability) == ((3, 1, 1), (512, 1, 1), (9, 0))
    assert first.metrics["gpu__time_duration.sum"] == 9120
    assert first.metrics["dram__bytes_read.sum"] == 133120
    assert "launch__func_cache_config" not in first.metrics


def test_a_kernel_is_the_median_of_its_launches_and_others_are_left_out():
    found = read(RECORDED / "ncu_raw.csv")
    assert [profile.launches for profile in found] == [2, 1, 1, 1]
    assert metrics.DURATION.of(found[FORWARD].metrics) == 9200
    assert metrics.LOADED.of(found[BACKWARD].metrics) == 268288
    assert all(profile.name.startswith("hopperflash_") for profile in found)


def test_metrics_in_rows_are_scaled_to_bytes_and_nanoseconds():
    (found,) = read(RECORDED / "ncu_rows.csv")
    values = found.metrics
    assert metrics.DURATION.of(values) == 1.25e6
    assert metrics.DRAM_READ.of(values) == pytest.approx(12.58e6)
    assert values["launch__shared_mem_per_block_allocated"] == pytest.approx(66560)
    # By sectors of 32 bytes, where the better metric was not counted.
    assert metrics.LOADED.of(values) == 32 * 1048576
    assert metrics.STORED.of(values) == 32 * 131072
    assert metrics.WGMMA.of(values) is None
    assert found.capability == (8, 0)


def test_the_longest_stalls_are_those_of_waiting_warps():
    found = metrics.stalls(read(RECORDED / "ncu_raw.csv")[FORWARD].metrics)
    assert found == (("gmma", 2.93), ("long_scoreboard", 1.18), ("wait", 0.74))


def test_what_is_no_csv_is_refused_with_what_ncu_says_in_it():
    text = "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission\n"
    with pytest.raises(InvalidArgument) as refused:
        parse(text)
    assert "--page raw --csv" in refused.value.reasons[0]
    assert refused.value.reasons[1] == tools.PERMISSION


def test_a_report_of_something_else_is_refused_with_what_is_in_it(tmp_path):
    text = (RECORDED / "ncu_raw.csv").read_text().replace("hopperflash_", "flash_")
    other = tmp_path / "other.csv"
    other.write_text(text)
    with pytest.raises(InvalidArgument, match="found flash_bwd_postprocess"):
        read(other)
    with pytest.raises(InvalidArgument, match="no such file"):
        read(tmp_path / "absent.csv")


def test_a_binary_report_needs_ncu_or_its_package(tmp_path, monkeypatch):
    monkeypatch.setattr(tools, "find", lambda tool: None)
    monkeypatch.setitem(__import__("sys").modules, "ncu_report", None)
    report = tmp_path / "x.ncu-rep"
    report.touch()
    with pytest.raises(InvalidArgument) as refused:
        read(report)
    assert len(refused.value.reasons) == 3
    assert "hopperflash[profiling]" in refused.value.reasons[1]


def test_ncu_reads_the_reports_that_it_wrote(tmp_path, monkeypatch):
    tool = tmp_path / "ncu"
    wanted = f"--import {tmp_path}/x.ncu-rep --page raw --csv --print-units base"
    tool.write_text(f'#!/bin/sh\n[ "$*" = "{wanted}" ] && cat {RECORDED}/ncu_raw.csv\n')
    tool.chmod(0o755)
    monkeypatch.setattr(tools, "find", lambda name: str(tool))
    report = tmp_path / "x.ncu-rep"
    report.touch()
    assert read(report) == read(RECORDED / "ncu_raw.csv")


def test_only_kernels_of_the_passes_are_profiled():
    words = command(TARGET, settings(), None).words
    assert words[-len(TARGET) :] == TARGET
    assert option(words, "--profile-from-start") == "off"
    pattern = option(words, "--kernel-name").removeprefix("regex:")
    launches = parse((RECORDED / "ncu_raw.csv").read_text())
    assert [bool(re.search(pattern, one.name)) for one in launches].count(True) == 5


def test_line_numbers_are_compiled_in_and_imported():
    plain, lines = (command(TARGET, settings(lineinfo=on), None) for on in (False, True))
    assert plain.variables == {}
    assert lines.variables == {env.LINE_INFO: "1"}
    assert str(lines).startswith("CUTE_DSL_LINEINFO=1 ")
    extra = [word for word in lines.words if word not in plain.words]
    assert extra == ["SourceCounters", "--import-source", "yes"]


def test_controls_and_sections_are_passed_on():
    chosen = settings(all_sections=True, cache_control="none", clock_control="none")
    words = command(TARGET, chosen, None).words
    assert option(words, "--set") == "full"
    assert option(words, "--cache-control") == option(words, "--clock-control") == "none"


def test_hopper_alone_is_asked_for_wgmma_and_tma():
    ours = re.compile("gmma|_tma_")
    assert len([name for name in metrics.asked("sm_90a") if ours.search(name)]) == 4
    assert not [name for name in metrics.asked("sm_80") if ours.search(name)]


def test_what_a_release_does_not_know_is_asked_for_by_another_name_or_not():
    known = metrics.base_names((RECORDED / "ncu_metrics.txt").read_text())
    assert len(known) == 18
    assert "Metric" not in known and "Chip" not in known
    wanted = metrics.asked("sm_90a", known)
    assert "l1tex__m_xbar2l1tex_read_bytes.sum" in wanted
    assert "lts__t_sectors_srcunit_tex_op_red.sum" in wanted  # stores by sectors
    assert not [name for name in wanted if "l1tex2xbar" in name or "pipe_xu" in name]
    newer = metrics.asked("sm_90a", known - {"dram__bytes_read"} | {"dram__bytes_op_read"})
    assert "dram__bytes_op_read.sum" in newer and "dram__bytes_read.sum" not in newer


def test_the_chip_of_a_target_is_asked_about(tmp_path, monkeypatch):
    tool = tmp_path / "ncu"
    tool.write_text(f'#!/bin/sh\n[ "$*" = "--query-metrics --chips gh100" ] &&'
                    f" cat {RECORDED}/ncu_metrics.txt\n")  # fmt: skip
    tool.chmod(0o755)
    monkeypatch.setattr(tools, "find", lambda name: str(tool))
    known = ncu.known_metrics("sm_90a")
    assert known is not None and "smsp__issue_active" in known
    assert ncu.known_metrics("sm_121a") is None
    monkeypatch.setattr(tools, "find", lambda name: None)
    assert ncu.known_metrics("sm_90a") is None
