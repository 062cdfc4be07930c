"""The figures of docs/io.md that texts began with, by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import hopperflash
from hopperflash.analysis.tiled_traffic import tiled_traffic
from hopperflash.analysis.traffic import materialized_traffic
from hopperflash.plan import arch_of

PAGE = (Path(__file__).parents[3] / "docs" / "io.md").read_text()
MB, GB, KIB, GIB = 10**6, 10**9, 2**10, 2**30


def row(text: str) -> str:
    (found,) = [line for line in PAGE.splitlines() if line.startswith(f"| {text} |")]
    return found.rsplit("|", 2)[1]


def test_scores_of_one_head() -> None:
    matrix = 8192 * 8192 * 2
    round_trips, operands = 4 * matrix, 4 * 8192 * 128 * 2
    says = row("8192 queries and keys, bf16, one head")
    assert f"{matrix / MB:.1f} MB" in says
    assert f"{round_trips / MB:.0f} MB" in says
    assert f"{round_trips // operands} times Q, K, V and O" in says
    x = torch.empty(1, 8192, 1, 128, dtype=torch.bfloat16, device="meta")
    problem = hopperflash.make_plan(x, x, x, arch="sm_90a").problem
    assert materialized_traffic(problem).total == round_trips + operands


def test_scores_of_a_batch() -> None:
    pairs = 32 * 8192 * 8192
    says = row("batch 1, 32 heads, 8192, fp16")
    assert f"{pairs:,} pairs" in says
    assert pairs * 2 == 4 * GIB and "exactly 4 GiB" in says


@pytest.mark.parametrize(("n", "gib"), [(64, 8), (32, 2)])
def test_gigabytes_are_gibibytes(n: int, gib: int) -> None:
    nbytes = (n * KIB) ** 2 * 2
    says = row(f"N = {n}K, fp16")
    assert nbytes == gib * GIB
    assert f"{gib} GiB" in says and f"{nbytes / GB:.2f} GB" in says


def test_entries() -> None:
    assert f"{4096**2:,}" in row("N = 4096, one head")
    assert f"{128 * 64:,}" in row("a tile of 128 queries and 64 keys")


def test_on_chip_memory() -> None:
    assert round(108 * 192 * KIB / MB) == 21 and "108 SMs of 192 KiB" in row("on-chip memory")
    says = row("shared memory")
    for name in ("sm_80", "sm_90a"):
        arch = arch_of(name)
        assert f"{arch.smem_bytes_per_sm // KIB} KiB" in says
        assert f"{arch.smem_bytes_per_block // KIB}" in says


def test_keys_are_read_once_a_pair_of_tiles_of_queries() -> None:
    n, d = 8192, 128
    x = torch.empty(1, n, 1, d, dtype=torch.bfloat16, device="meta")
    plan = hopperflash.make_plan(x, x, x, arch="sm_90a")
    streams = {stream.operand: stream for stream in tiled_traffic(plan).streams}
    elements = (streams["K"].loaded + streams["V"].loaded) // 2
    config = plan.calls[0].spec.config
    assert elements == 2 * n * n * d // (config.tile_m * config.cluster_m)
