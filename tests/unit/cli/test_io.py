"""`hopperflash io`: the figures of the texts that the project came from, and its table."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from hopperflash.cli.io import IoOptions, report_of
from hopperflash.cli.main import app
from hopperflash.cli.options import DTypeName

GIB = 2**30


def run(*options: str) -> Any:
    result = CliRunner().invoke(app, ["io", *options])
    assert result.exit_code == 0, result.stderr
    return result.stdout


def last_row(direction: str, *options: str) -> dict[str, Any]:
    rows = json.loads(run(*options, "--json"))["rows"]
    return [row for row in rows if row["direction"] == direction][-1]


def test_one_head_of_8192_in_bf16() -> None:
    """A score matrix of 134 MB, written and read, and a matrix of probabilities the same."""
    row = last_row("forward", "--heads", "1", "--seqlen", "8192", "--full")
    matrix = 8192 * 8192 * 2
    assert row["scores"] == matrix == 134_217_728
    operands = 8192 * 128 * 2
    assert row["materialized"] == {
        "loaded": 2 * matrix + 3 * operands,
        "stored": 2 * matrix + operands,
    }


@pytest.mark.parametrize(
    ("heads", "seqlen", "gib"), [("32", "8192", 4), ("1", "65536", 8), ("1", "32768", 2)]
)
def test_score_matrices_of_the_seeds(heads: str, seqlen: str, gib: int) -> None:
    row = last_row("forward", "--heads", heads, "--seqlen", seqlen, "--dtype", "fp16")
    assert row["scores"] == gib * GIB


def test_tiled_bytes_of_a_forward_by_hand() -> None:
    """Head dim 128, two heads that share keys: 64 queries of both in a tile of 128 rows, and two
    tiles that load together."""
    row = last_row("forward", "--heads", "2", "--kv-heads", "1", "--seqlen", "4096", "--full")
    q = out = 2 * 4096 * 128 * 2
    keys_and_values = 2 * 4096 * 128 * 2
    loads = 4096 // (2 * 64)
    lse = 2 * 4096 * 4
    assert row["asked"] == {"loaded": q + loads * keys_and_values, "stored": out + lse}
    assert row["once"] == {"loaded": q + keys_and_values, "stored": out + lse}
    assert row["behind_l2"] == row["once"]


def test_a_cache_too_small_for_a_head_is_filled_once_a_wave() -> None:
    options = IoOptions(heads=1, kv_heads=1, seqlen=65536, causal=False, l2_mib=8, sms=100)
    forward = report_of(options).rows[-2]
    q = 65536 * 128 * 2
    waves = -(-(65536 // 128) // 100)
    assert forward.behind_l2.loaded == q + waves * 2 * q
    large = report_of(IoOptions(**{**vars(options), "l2_mib": 512})).rows[-2]
    assert large.behind_l2 == large.once
    none = report_of(IoOptions(**{**vars(options), "l2_mib": 0, "sms": 1})).rows[-2]
    assert none.behind_l2 == none.asked


def test_lengths_double_up_to_the_one_asked_for() -> None:
    report = report_of(IoOptions(seqlen=3000, dtype=DTypeName.FP16))
    assert [row.seqlen_q for row in report.rows[::2]] == [512, 1024, 2048, 3000]


def test_table() -> None:
    text = run("--seqlen", "1024", "--heads", "4", "--kv-heads", "2")
    assert "4 query heads over 2" in text
    assert "50 MiB of L2" in text
    assert "materialised" in text
    assert max(map(len, text.splitlines()[2:])) <= 80


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--seqlens", "5,6"), "--seqlens: the lengths of packed sequences"),
        (("--arch", "cpu"), "runs no kernels"),
        (("--head-dim", "12"), "head_dim of q is 12"),
    ],
)
def test_refused(options: tuple[str, ...], words: str) -> None:
    result = CliRunner().invoke(app, ["io", *options])
    assert result.exit_code == 2
    assert words in result.stderr
