"""The programs of docs/emulator.md run as they stand there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.documents import ROOT, run_program, write_programs

pytestmark = pytest.mark.emulated


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("docs")
    write_programs(ROOT / "docs" / "emulator.md", made)
    return made


def test_the_script_prints_sums_and_a_report(folder: Path) -> None:
    output = run_program(folder, "try_row_sum.py")
    computed, expected = (
        [float(number) for number in match.split(",")]
        for match in re.findall(r"tensor\(\[(.*?)\]\)", output)
    )
    assert computed == pytest.approx(expected, rel=1e-3, abs=1e-3)
    assert "4x3x1" in output and "no hazards" in output


def test_schedules_give_the_same_bits(folder: Path) -> None:
    assert run_program(folder, "schedules.py") == "1 result in all schedules\n"


def test_the_ptx_may_be_deleted_once_compiled(folder: Path) -> None:
    code = (
        "import os, pathlib, torch; from hopperflash.emulator import launch\n"
        "from row_sum import compiled; kernel = compiled()\n"
        "files = list(pathlib.Path(os.environ['CUTE_DSL_DUMP_DIR']).glob('*.ptx'))\n"
        "for file in files: file.unlink()\n"
        "x, out = torch.ones(3, 1000), torch.empty(3)\n"
        "launch(kernel, x, out); print(len(files), out.tolist())"
    )
    assert run_program(folder, "-c", code) == "1 [1000.0, 1000.0, 1000.0]\n"


def test_processes_share_a_grid(folder: Path) -> None:
    assert "CTAs: 32 hazards: []" in run_program(folder, "row_sums_in_parallel.py")


def test_the_test_passes_with_every_schedule(folder: Path) -> None:
    output = run_program(folder, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_row_sum.py")
    assert "3 passed" in output


def test_the_fixture_fails_on_hazards(folder: Path) -> None:
    """Without the wait for the parts."""
    source = (folder / "row_sum.py").read_text()
    broken = folder / "broken"
    broken.mkdir()
    for name in ("conftest.py", "test_row_sum.py"):
        (broken / name).write_text((folder / name).read_text())
    (broken / "row_sum.py").write_text(
        source.replace("cute.arch.mbarrier_wait(arrived, 0)", "pass")
    )
    with pytest.raises(AssertionError, match="hazards:"):
        run_program(broken, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_row_sum.py")
