"""The programs of docs/debugging.md find the faults that they make, and print what it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from itertools import takewhile
from pathlib import Path

import pytest

from tests.support.documents import ROOT, blocks, commands, run_program, write_programs

PAGE = ROOT / "docs" / "debugging.md"

pytestmark = pytest.mark.emulated


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("docs")
    write_programs(ROOT / "docs" / "emulator.md", made)
    write_programs(PAGE, made)
    return made


def shown(program: str) -> list[str]:
    """The lines of the texts behind a program."""
    found = list(blocks(PAGE))
    at = next(i for i, block in enumerate(found) if block.text.startswith(f"# {program}\n"))
    texts = takewhile(lambda block: block.language == "text", found[at + 1 :])
    return [line for block in texts for line in block.text.splitlines()]


def check(program: str, output: str) -> None:
    """Every line of the page is there, but for what follows; N is any line of PTX."""
    lines = shown(program)
    assert lines
    for line in lines:
        pattern = re.escape(line).replace("line\\ N", r"line\ \d+")
        assert re.search(pattern, output), (line, output)


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("hang.py", "CTA (0, 0, 0) warps [0]: waits for parity 0 of mbarrier"),
        ("race.py", "shared memory read before its bulk load landed"),
    ],
)
def test_it_is_found(folder: Path, program: str, words: str) -> None:
    output = run_program(folder, program)
    assert words in output
    check(program, output)


def test_every_report_of_the_race_is_explained(folder: Path) -> None:
    """By its first words, before the address or the mbarrier."""
    found = run_program(folder, "race.py").splitlines()
    assert len(found) == 3
    lines = shown("race.py")
    for report in found:
        assert any(line.startswith(report.split(": ")[0]) for line in lines), report


def numbers(line: str) -> list[float]:
    return [float(error) for error in re.findall(r"\d\.\d{3}", line)]


@pytest.mark.xdist_group("bf16-64")
def test_a_wrong_gradient_is_told_from_right_ones(folder: Path) -> None:
    output = run_program(folder, "wrong_gradient.py").splitlines()
    found, page = (
        [numbers(line) for line in lines] for lines in (output, shown("wrong_gradient.py"))
    )
    assert found == [pytest.approx(line, abs=2e-3) for line in page]
    broken, right = found
    assert min(broken[:2]) > 0.1 and broken[2] < 0.01
    assert max(right) < 0.02


@pytest.mark.xdist_group("bf16-64")
def test_the_log_says_what_is_compiled_and_why() -> None:
    """With the variables of the page, whatever is in the cache."""
    (command,) = (c for c in commands(PAGE) if "HOPPERFLASH_LOG" in c.text)
    words = ("--seqlen=64", "--heads=1", "--kv-heads=1", "--head-dim=64")
    done = subprocess.run(
        [sys.executable, "-m", *command.words, *words],
        env={**os.environ, **command.variables, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "hopperflash: compile ForwardSm90 for sm_90a: HOPPERFLASH_CACHE is off" in done.stderr
