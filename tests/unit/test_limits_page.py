"""What docs/limits.md says is refused is refused, for the reason it gives."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hopperflash

PAGE = (Path(__file__).parents[2] / "docs" / "limits.md").read_text()
ROWS = re.findall(r"^\| `(.*?)` \| (.*?) \|$", PAGE, re.MULTILINE)


def x(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def refusal(call: str) -> str:
    """Every reason against a call, which is written as keywords."""
    given: dict[str, Any] = eval(f"dict({call})", {"x": x, "torch": torch})
    operands = [given.pop(name, x(1, 64, 2, 64)) for name in "qkv"]
    found = hopperflash.supports(*operands, **{"arch": "sm_90a", **given})
    assert not found
    return "; ".join(found.reasons)


def test_the_page_has_rows() -> None:
    assert len(ROWS) >= 14


@pytest.mark.parametrize(("call", "reason"), ROWS)
def test_refused(call: str, reason: str) -> None:
    assert reason in refusal(call)


def test_the_plain_call_is_not() -> None:
    assert hopperflash.supports(*(x(1, 64, 2, 64) for _ in "qkv"), arch="sm_90a")


def test_bounds_are_those_of_the_plan() -> None:
    from hopperflash.plan import limits

    assert limits.SEQLEN_MAX == 2**31 - 256
    assert limits.WINDOW_SEQLEN_MAX == 2**29
    assert limits.PACKED_ROWS_MAX == 2**30 - 256
    assert limits.GRID_YZ_MAX == 65_535
