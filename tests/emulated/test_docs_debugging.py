"""The programs of docs/debugging.md find the faults that they make, and print what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.documents import ROOT, blocks, run_program, write_programs

PAGE = ROOT / "docs" / "debugging.md"

pytestmark = pytest.mark.emulated


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("docs")
    write_programs(ROOT / "docs" / "emulator.md", made)
    write_programs(PAGE, made)
    return made


def shown(program: str) -> list[str]:
    """The lines of the text behind a program."""
    found = list(blocks(PAGE))
    at = next(i for i, block in enumerate(found) if block.text.startswith(f"# {program}\n"))
    return found[at + 1].text.splitlines()


def without_numbers(text: str) -> str:
    return re.sub(r"0x[0-9a-f]+|\d+(\.\d+)?", "#", text)


def check(program: str, output: str) -> None:
    """Every line of the page is there, but for numbers and what follows."""
    for line in shown(program):
        assert without_numbers(line) in without_numbers(output), output


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


@pytest.mark.xdist_group("bf16-64")
def test_a_wrong_gradient_is_told_from_right_ones(folder: Path) -> None:
    output = run_program(folder, "wrong_gradient.py")
    check("wrong_gradient.py", output)
    broken, right = (
        [float(error) for error in re.findall(r"\d\.\d{3}", line)] for line in output.splitlines()
    )
    assert min(broken[:2]) > 0.1 and broken[2] < 0.01
    assert max(right) < 0.02
