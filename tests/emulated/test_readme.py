"""The examples of the README and of docs/runtime.md run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = [
    pytest.param(example, id=f"{page}-{number}")
    for page in ("README.md", "docs/runtime.md")
    for number, example in enumerate(
        re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    )
]

pytestmark = [pytest.mark.emulated, pytest.mark.xdist_group("fp16-64")]


@pytest.mark.parametrize("example", EXAMPLES)
def test_example_runs(example: str) -> None:
    exec(compile(example, "<example>", "exec"), {})
