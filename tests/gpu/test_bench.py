"""`hopperflash bench` on a GPU: kernels are timed, not their launches, at speeds that there are."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from hopperflash.cli.main import app

pytestmark = pytest.mark.gpu

DENSE_PEAK = 3e15  # FLOP/s in bf16; of any GPU so far


def test_ours_is_timed_beside_sdpa() -> None:
    options = ("--head-dims=64", "--seqlens=512,2048", "--milliseconds=20", "--warm-up=10")
    result = CliRunner().invoke(app, ["bench", "--tokens=8192", "--json=-", *options])
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["machine"]["device"] == "cuda"
    mine = [row for row in found["rows"] if row["implementation"] == "hopperflash"]
    assert [row["status"] for row in mine] == ["timed"] * (2 * 2 * 2 * 2)
    assert all(1e12 < row["flops_per_second"] < DENSE_PEAK for row in mine)
    peers = {row["implementation"] for row in found["rows"] if row["status"] == "timed"}
    assert {"sdpa-flash", "sdpa-math"} <= peers
