"""`hopperflash profile` without a GPU: commands, reports from elsewhere, and refusals."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hopperflash.cli import profile
from hopperflash.cli.main import app
from hopperflash.cli.options import DTypeName
from hopperflash.cli.profile import NcuOptions, TargetOptions, target_command
from hopperflash.profiler import tools

ROOT = Path(__file__).parents[3]
RECORDED = ROOT / "tests" / "unit" / "profiler" / "recorded"
SIZES = ("--seqlen", "256", "--head-dim", "64")


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["profile", *arguments])


@pytest.fixture(autouse=True)
def _no_tools(monkeypatch) -> None:
    monkeypatch.setattr(tools, "find", lambda tool: None)


@pytest.fixture
def no_gpu(monkeypatch) -> None:
    monkeypatch.setattr(profile.tools, "_no_gpu", lambda: "no GPU to profile: none is here")


@pytest.mark.parametrize("tool", ["ncu", "nsys", "iket"])
def test_a_dry_run_prints_a_command_that_runs_the_target(tool):
    result = run(tool, "--dry-run", *SIZES, "--direction", "backward", "--full")
    assert result.exit_code == 0, result.output
    words = shlex.split(result.stdout)
    assert words[0].endswith(tool)
    target = words[words.index("target") + 1 :]
    assert {"--seqlen=256", "--head-dim=64", "--direction=backward", "--full"} <= set(target)
    # What the tool itself is told is no business of the target.
    assert not [word for word in target if "arch" in word or "dry" in word]


def test_the_target_is_given_every_option_that_is_not_as_by_default():
    given = TargetOptions(
        seqlens="5,130", window="31,0", softcap=20.0, dtype=DTypeName.FP16, causal=False,
        sm_margin=8, deterministic=True, backend="sm80", iterations=2, warm_up=0, seed=3,
        direction="forward",
    )  # fmt: skip
    words = target_command(given)[5:]
    assert set(words) == {
        "--seqlens=5,130", "--window=31,0", "--softcap=20.0", "--dtype=fp16", "--full",
        "--sm-margin=8", "--deterministic", "--backend=sm80", "--iterations=2", "--warm-up=0",
        "--seed=3", "--direction=forward",
    }  # fmt: skip
    assert target_command(TargetOptions())[5:] == ()
    assert target_command(NcuOptions(lineinfo=True)) == target_command(TargetOptions())


def test_the_target_runs_as_the_command_says():
    command = target_command(TargetOptions(seqlens="5,40,0", head_dim=16, warm_up=1))
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    wrong = subprocess.run(
        (*command, "--backend=sm90"), cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert wrong.returncode == 2 and "sm90" in wrong.stderr


@pytest.mark.parametrize("tool", ["ncu", "nsys", "iket"])
@pytest.mark.usefixtures("no_gpu")
def test_everything_that_is_missing_is_told_at_once_with_a_way_out(tool):
    result = run(tool, *SIZES)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert f"- no {'run-iket' if tool == 'iket' else tool} in PATH" in result.stderr
    assert "- no GPU to profile" in result.stderr
    assert "`--dry-run` prints the command" in result.stderr
    assert ("`--emulated`" in result.stderr) == (tool == "ncu")


def test_wrong_options_are_told_at_once():
    result = run(
        "ncu", "--direction", "up", "--cache-control", "some", "--clock-control", "high",
        "--dry-run", "--emulated", "--report", "x.csv",
    )  # fmt: skip
    assert result.exit_code == 2
    for text in (
        "--direction is 'up': give forward, backward or both",
        "--cache-control is 'some': give all or none",
        "--clock-control is 'high': give base or none",
        "--dry-run and --emulated and --report exclude each other",
    ):
        assert f"- {text}" in result.stderr


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (("--heads", "3", "--kv-heads", "2"), "heads"),
        (("--head-dim", "12"), "head_dim of q is 12"),
        (("--seqlens", "0,0"), "nothing to profile"),
        (("--backend", "cpu"), "cpu"),
    ],
)
@pytest.mark.parametrize("tool", ["ncu", "nsys", "iket"])
def test_what_cannot_run_is_refused_before_a_tool_is_started(tool, sizes, message):
    result = run(tool, "--dry-run", *sizes)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr and result.stdout == ""


def test_a_report_is_printed_beside_the_models():
    result = run("ncu", "--report", str(RECORDED / "ncu_raw.csv"), *SIZES)
    assert result.exit_code == 0, result.output
    forward = result.stdout.split("\n\n")[0]
    assert "9.2 us, grid 3x1x1 of 512x1x1 threads, median of 2 launches" in forward
    rows = [line.split("  ") for line in forward.splitlines()]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    assert ["loaded by SMs", "229.4 kB", "229.4 kB", "1.000"] in cells
    assert ["of it by TMA", "229.4 kB"] in cells
    assert ["tensor cores", "31.0 %"] in [row[:2] for row in cells]
    assert "gmma 2.93, long_scoreboard 1.18, wait 0.74" in forward


def test_a_report_as_json_holds_counted_and_modelled_bytes():
    result = run("ncu", "--report", str(RECORDED / "ncu_raw.csv"), *SIZES, "--json")
    kernels = json.loads(result.stdout)["kernels"]
    assert len(kernels) == 4
    loaded = kernels[2]["bytes"][0]
    assert loaded == {
        "name": "loaded by SMs", "counted": 268288.0, "model": 268288, "ratio": 1.0
    }  # fmt: skip


def test_a_report_of_an_ampere_is_compared_with_its_plan():
    sizes = ("--heads", "16", "--kv-heads", "16", "--seqlen", "8192", "--dtype", "fp16", "--full")
    result = run("ncu", "--report", str(RECORDED / "ncu_rows.csv"), *sizes, "--json")
    (kernel,) = json.loads(result.stdout)["kernels"]
    models = [row["model"] for row in kernel["bytes"]]
    assert models[0] > 0 and {unit["model"] for unit in kernel["units"]} == {None}


def test_packed_sequences_say_why_no_bytes_are_modelled():
    result = run("ncu", "--report", str(RECORDED / "ncu_raw.csv"), "--seqlens", "256")
    assert result.exit_code == 0
    assert "no model of their bytes" in result.stderr


def test_a_trace_is_printed_by_pass_and_kernel():
    result = run("nsys", "--report", str(RECORDED / "trace.nsys-rep"))
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["forward", "2", "6.5", "9.2", "9.2", "0.0", "0.0"] in lines
    kernel = "hopperflash_fwd_sm90_bfloat16_d64x64_192x128_causal_group2_0"
    assert ["1", "x", "9.2", "us", kernel] in lines
    document = json.loads(
        run("nsys", "--report", str(RECORDED / "trace.nsys-rep"), "--json").stdout
    )
    assert [one["name"] for one in document["passes"]] == ["forward", "backward"]


def test_a_profile_runs_and_is_read(tmp_path, monkeypatch):
    """The whole way, with a tool that leaves the recorded report where it is told to."""
    tool = tmp_path / "ncu"
    tool.write_text(f"""#!{sys.executable}
import sys
from pathlib import Path
recorded, words = Path({str(RECORDED)!r}), sys.argv
if "--export" in words:
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
    report = tmp_path / "out.ncu-rep"
    result = run("ncu", *SIZES, "--out", str(report), "--json")
    assert result.exit_code == 0, result.output
    assert len(json.loads(result.stdout)["kernels"]) == 4
    assert f"for ncu-ui: {report}" in result.stderr


def test_the_documented_form_is_current():
    page = (ROOT / "docs" / "profiling.md").read_text()
    (block,) = (part for part in page.split("```") if part.startswith("text\nhopperflash_fwd"))
    shown = [line for line in block.splitlines()[1:] if line.strip(" .")]
    assert len(shown) == 6
    printed = run("ncu", "--report", str(RECORDED / "ncu_raw.csv"), *SIZES).stdout.splitlines()
    lines = [line.rstrip() for line in printed]
    assert [line for line in shown if line not in lines] == []
