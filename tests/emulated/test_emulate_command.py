"""`hopperflash emulate` prints what the kernels did."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from hopperflash.cli.main import app

pytestmark = [pytest.mark.emulated, pytest.mark.xdist_group("bf16-128")]

# Two tiles of queries: the second sees both tiles of keys.
SIZES = ("--seqlen", "256", "--heads", "1", "--head-dim", "128", "--causal")
TILES = 3


def emulate(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["emulate", *arguments])


def test_counters_follow_from_the_problem() -> None:
    result = emulate(*SIZES, "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    counters = document["counters"]
    flops = TILES * 2 * 2 * 128**3
    assert counters["wgmma_flops"] == flops
    assert counters["flops:wgmma:m64n128k16.f32.bf16.bf16"] == flops
    assert counters["wgmma:m64n128k16.f32.bf16.bf16"] == TILES * 2 * 2 * 8
    tile_bytes = 128 * 128 * 2
    assert counters["tma_load_bytes"] == 2 * tile_bytes + 2 * TILES * tile_bytes
    assert counters["unique_global_load_bytes"] == 3 * 256 * 128 * 2
    reread = counters["tma_load_bytes"] - counters["unique_global_load_bytes"]
    assert counters["global_reread_bytes"] == reread
    assert counters["tma_store_bytes"] == 256 * 128 * 2
    assert counters["global_store_bytes"] == 256 * 4
    assert counters["launches"] == 1 and counters["ctas"] == 2
    (kernel,) = document["kernels"].values()
    assert kernel == counters
    assert document["ok"] and document["hazards"] == []
    classes = {n: v for n, v in counters.items() if n.startswith("class:")}
    assert sum(classes.values()) == counters["warp_instructions"]


def test_sms_are_left_free() -> None:
    result = emulate(*SIZES, "--sm-margin", "131", "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    (launch,) = document["launches"]
    assert launch["grid"] == [1, 1, 1]
    assert document["counters"]["wgmma_flops"] == TILES * 2 * 2 * 128**3


def test_report_for_people() -> None:
    result = emulate(*SIZES, "--schedule", "eager")
    assert result.exit_code == 0, result.output
    for text in ("tensor cores", "global memory", "m64n128k16.f32.bf16.bf16", "no hazards"):
        assert text in result.stdout


def test_packed_sequences_under_a_window_and_a_cap() -> None:
    sizes = ("--seqlens", "5,130,0,64", "--heads", "1", "--head-dim", "128")
    result = emulate(*sizes, "--window", "31,0", "--softcap", "20", "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    table, forward = (launch["kernel_name"] for launch in document["launches"])
    assert table.startswith("hopperflash_tile_table")
    assert "window_softcap_packed" in forward
    # 5, 64, and 130 rows as 128 and 2: the last see the end of the tile before theirs.
    assert document["counters"]["wgmma_flops"] == 5 * 2 * 2 * 128**3
    assert document["ok"]


def test_backward_runs_after_the_forward() -> None:
    sizes = ("--seqlen", "64", "--heads", "1", "--head-dim", "128")
    result = emulate(*sizes, "--causal", "--direction", "backward", "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    parts = ("fwd_sm90", "bwd_preprocess", "bwd_sm90", "bwd_postprocess")
    for launch, part in zip(document["launches"], parts, strict=True):
        assert launch["kernel_name"].startswith(f"hopperflash_{part}_")
    assert document["counters"]["launches"] == len(parts)
    backward = document["kernels"][document["launches"][2]["kernel_name"]]
    # Five products of 64 queries and 128 keys.
    assert backward["wgmma_flops"] == 5 * 2 * 64 * 128 * 128


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--direction", "sideways"), "sideways"),
        (("--arch", "cpu"), "no GPU"),
        (("--schedule", "sometimes"), "sometimes"),
        (("--window", "1"), "LEFT,RIGHT"),
    ],
)
def test_refusals_name_the_option(arguments: tuple[str, ...], message: str) -> None:
    result = emulate(*SIZES, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
