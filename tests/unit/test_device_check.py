"""The check of a rented GPU: its steps run as processes, its time, its summary; no GPU needed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import pytest

from profiling import device_check
from profiling.device_check import CANNOT, FAILED, OK, Step, Summary, check

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_check, "GRACE", 0.5)
    monkeypatch.setattr(device_check, "WORTHWHILE", 1.0)


def python(name: str, code: str, limit: float = 60.0, share: float = 1.0) -> Step:
    return Step(name, (sys.executable, "-c", code), limit, share)


def checked(folder: Path, *steps: Step, seconds: float = 120.0) -> tuple[int, list[str], str]:
    """The exit status, the results and the summary."""
    summary = Summary(folder, seconds / 60, ["a fact"])
    status = check(steps, summary, time.monotonic() + seconds)
    results = [outcome.result for outcome in summary.outcomes]
    return status, results, timeless((folder / "summary.md").read_text())


def timeless(text: str) -> str:
    """Without the seconds, which depend on the machine."""
    return re.sub(r"\| \d+ \|", "| S |", text)


def test_a_failed_step_does_not_stop_the_next(tmp_path: Path) -> None:
    status, results, text = checked(
        tmp_path,
        python("one", "print('=== 3 passed | 1 skipped ===')"),
        python("two", "raise SystemExit('broke')"),
        Step("three", ("ncu",), 60, missing="no ncu in PATH"),
        python("four", "print('done')"),
    )
    assert status == FAILED
    assert results == ["ok", "FAILED", "left out", "ok"]
    assert "**2 of 4 steps ok; failed: two**" in text
    assert "- a fact" in text
    assert "| [one](01-one.log) | ok | S | 3 passed \\| 1 skipped |" in text
    assert "| [two](02-two.log) | FAILED | S | broke |" in text
    assert "| three | left out | S | no ncu in PATH |" in text
    assert (tmp_path / "04-four.log").read_text() == "done\n"


def test_the_summary_is_there_while_a_step_runs(tmp_path: Path) -> None:
    """The second step reads what the first has left."""
    path = tmp_path / "summary.md"
    status, _, text = checked(
        tmp_path,
        python("one", "print('first words')"),
        python("two", f"print(open({str(path)!r}).read(), 'end')"),
        python("three", ""),
    )
    assert status == OK
    seen = timeless((tmp_path / "02-two.log").read_text())
    assert "**running two**" in seen
    assert "| ok | S | first words |" in seen
    assert "| two | waiting | | |\n| three | waiting | | |" in seen
    assert "running" not in text
    assert "| waiting | | |\n" not in text


def test_a_step_that_takes_too_long_is_ended_with_all_it_started(tmp_path: Path) -> None:
    child = tmp_path / "child"
    code = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
open({str(child)!r}, "w").write(str(child.pid))
time.sleep(60)
"""
    status, results, _ = checked(
        tmp_path, python("slow", code, limit=8.0), python("next", "print('ran')")
    )
    assert status == FAILED
    assert results == ["TOO LONG", "ok"]
    state = Path(f"/proc/{child.read_text()}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z"


def test_all_ends_in_time_and_that_is_no_fault(tmp_path: Path) -> None:
    begin = time.monotonic()
    sleep = "import time; time.sleep(60)"
    status, results, text = checked(
        tmp_path, python("slow", sleep), python("never", "print()"), seconds=3.0
    )
    assert time.monotonic() - begin < 30
    assert (status, results) == (OK, ["cut off", "left out"])
    assert "| never | left out | S | no time left |" in text


def test_a_share_leaves_time_for_the_rest(tmp_path: Path) -> None:
    sleep = "import time; time.sleep(60)"
    slow = python("slow", sleep, share=0.02)
    status, results, _ = checked(tmp_path, slow, python("next", "print()"), seconds=60.0)
    assert (status, results) == (OK, ["cut off", "ok"])


def test_a_missing_permission_is_told_and_no_fault(tmp_path: Path) -> None:
    text = "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission"
    status, results, summary = checked(
        tmp_path,
        python("ncu-forward", f"print({text!r})"),
        python("ncu-other", "print('==WARNING== No kernels were profiled.')"),
    )
    assert (status, results) == (FAILED, ["left out", "FAILED"])
    assert "NVreg_RestrictProfilingToAdminUsers=0" in summary
    assert "no kernel of this package was launched" in summary


def test_without_a_gpu_it_says_so_and_leaves_a_summary(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "profiling.device_check", "--minutes=1", f"--out={tmp_path}"],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == CANNOT
    assert "no GPU to check" in result.stderr
    text = (tmp_path / "summary.md").read_text()
    assert "**nothing can run here**" in text
    assert "no GPU to check" in text
    assert [path.name for path in tmp_path.iterdir()] == ["summary.md"]


def test_what_is_missing_is_named_with_what_to_carry(monkeypatch) -> None:
    version = metadata.version

    def without_the_compiler(name: str) -> str:
        if name == "nvidia-cutlass-dsl":
            raise metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(metadata, "version", without_the_compiler)
    missing, with_index, download, carry = device_check.obstacles()
    wanted = "'nvidia-cutlass-dsl>=4.8.1,<4.9'"
    assert missing == f"not installed: {wanted.strip(chr(39))}"
    assert with_index.endswith("pip install '.[test]'`, which brings them")
    assert "pip download" in download and download.endswith(f"--dest wheels {wanted}`")
    assert "carry the folder wheels" in carry and wanted in carry


def test_the_steps_are_of_files_and_commands_that_exist(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(device_check.tools, "find", lambda tool: None)
    steps = device_check.steps(tmp_path)
    names = [step.name for step in steps]
    assert names[:3] == ["doctor", "demo", "tests-forward"]
    assert len(set(names)) == len(names)
    assert [step.name for step in steps if step.missing] == [
        "ncu-forward",
        "ncu-backward",
        "nsys-both",
    ]
    files = {part for step in steps for part in step.command if part.endswith(".py")}
    assert files == {str(path) for path in (ROOT / "tests" / "gpu").glob("test_*.py")}
