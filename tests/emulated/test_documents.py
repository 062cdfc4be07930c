"""README and docs/: commands that compile or emulate, and examples in Python, run as they stand."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import documents
from tests.support.documents import COMMANDS, ROOT, Block, Run, run_command

EMULATED = [text for text, how in COMMANDS.items() if isinstance(how, Run) and how.emulated]
EXAMPLES = [
    pytest.param(block, id=str(block))
    for page, test in documents.EXAMPLES.items()
    if test == f"tests/emulated/{Path(__file__).name}"
    for block in documents.examples(ROOT / page)
]

pytestmark = pytest.mark.emulated


@pytest.mark.xdist_group("fp16-64")
@pytest.mark.parametrize("example", EXAMPLES)
def test_example_runs(example: Block) -> None:
    exec(compile(example.text, str(example), "exec"), {})


@pytest.mark.xdist_group("bf16-64")
@pytest.mark.parametrize("text", EMULATED)
def test_command_runs(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    how = COMMANDS[text]
    assert isinstance(how, Run)
    run_command(documents.all_commands()[text], how, tmp_path, monkeypatch)
