"""What the README shows is what the package does."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from typer.testing import CliRunner

from hopperflash.cli.main import app

README = (Path(__file__).parents[3] / "README.md").read_text()
FENCED = re.findall(r"^```(\w*)\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
BLOCKS = [text for language, text in FENCED if not language]


def test_there_are_exactly_two_set_up_commands():
    set_up = [block for block in BLOCKS if "pip install" in block]
    assert set_up == [
        "pip install . && hopperflash demo\n",
        "pip install '.[test]' && pytest\n",
    ]


def test_the_printed_plan_is_current():
    (block,) = [block for block in BLOCKS if block.startswith("$ hopperflash explain")]
    command, output = block.split("\n", 1)
    result = CliRunner().invoke(app, shlex.split(command)[2:])
    assert result.stdout == output


def test_links_lead_somewhere():
    root = Path(__file__).parents[3]
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (root / target).exists(), target
