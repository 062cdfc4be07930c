"""What `profiling` counts of one head stands for the whole problem, and is what its tiles need."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

import hopperflash
from hopperflash.problem import Direction, MaskSpec
from profiling.compare_counters import heads
from profiling.counters import (
    Head,
    LaunchCount,
    PassCount,
    as_json,
    concave_sum,
    count_ours,
    from_json,
    planned_launches,
)

pytestmark = [pytest.mark.emulated, pytest.mark.xdist_group("bf16-64")]

ROOT = Path(__file__).parents[2]
MISSING = [name for name in ("flash_attn", "triton") if importlib.util.find_spec(name) is None]
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")
MASKS = {"full": MaskSpec(), "causal": MaskSpec(right=0), "window": MaskSpec(400, 0)}


@pytest.fixture(params=DIRECTIONS)
def direction(request: pytest.FixtureRequest) -> Direction:
    return request.param


def executed(head: Head, batch: int, heads: int) -> Mapping[str, int]:
    """The counters of a run of all CTAs."""
    mask = head.mask
    x = torch.randn(batch, head.seqlen, heads, head.head_dim).bfloat16()
    lse = torch.randn(batch, heads, head.seqlen)
    band = tuple(-1 if bound is None else bound for bound in (mask.left, mask.right))
    with hopperflash.emulate("sm_90a", schedule="eager", hazards="basic") as run:
        if head.direction == "forward":
            hopperflash.flash_attn_func(x, x, x, window_size=band)
        else:
            hopperflash.flash_attn_backward(x, x, x, x, x, lse, window_size=band)
    return run.counters


def total(counters: Mapping[str, int]) -> int:
    names = ("tma_load", "tma_store", "global_load", "global_store", "global_atomic")
    return sum(counters[f"{name}_bytes"] for name in names)


@pytest.mark.parametrize(
    ("head_dim", "name"), [*((64, name) for name in MASKS), (128, "full"), (128, "causal")]
)
def test_few_ctas_stand_for_all(direction: Direction, head_dim: int, name: str) -> None:
    """At head dim 128 forward CTAs are in pairs."""
    head = Head(direction, head_dim, head_dim, MASKS[name], 1500)
    found, whole = count_ours(head), executed(head, 1, 1)
    assert found.bytes == total(whole)
    assert found.flops == whole["wgmma_flops"]
    assert sum(launch.ctas for launch in found.launches) == whole["ctas"]


def test_one_head_stands_for_all(direction: Direction) -> None:
    """Two batch entries of three heads do six times what one head does."""
    head = Head(direction, 64, 64, MaskSpec(right=0), 300)
    found, whole = count_ours(head), executed(head, 2, 3)
    assert 6 * found.bytes == total(whole)
    assert 6 * found.flops == whole["wgmma_flops"]


@pytest.mark.parametrize("left", [None, 0, 9, 40])
@pytest.mark.parametrize("mirrored", [False, True])
def test_concave_counts_are_summed_exactly(left: int | None, mirrored: bool) -> None:
    """Key blocks of 2 rows that 200 queries see, the last of them few: by a fraction of them."""
    looked_at = set()

    def count(index: int) -> LaunchCount:
        looked_at.add(index)
        row = 199 - index if mirrored else index
        begin = 0 if left is None else max(0, row - left)
        return LaunchCount(1, min(row + 1, 187) - min(begin, 187), 1 + (row < 199), 0, 0)

    found = concave_sum(count, range(200))
    assert len(looked_at) < 60
    assert found == LaunchCount(*map(sum, zip(*map(count, range(200)), strict=True)))


@pytest.mark.parametrize(
    ("dims", "name"), [*(((64, 64), name) for name in MASKS), ((192, 128), "causal")]
)
def test_no_tensor_work_is_for_nothing(
    direction: Direction, dims: tuple[int, int], name: str
) -> None:
    found = count_ours(Head(direction, *dims, MASKS[name], 700))
    assert found.beyond == 0.0
    assert found.loads_per_tile <= 1.0
    assert found.over_visible > 1.0
    assert len(found.launches) == (1 if direction == "forward" else 3)


def test_tiles_that_no_pair_needs_are_seen(direction: Direction) -> None:
    """All 16 tiles of a causal mask, of which 4 + 3 + 2 + 1 hold a pair."""
    head = Head(direction, 64, 64, MaskSpec(right=0), 512)
    work = head.pair_flops * 512**2
    wasteful = PassCount(head, 128, 128, (LaunchCount(4, 0, 0, 0, work),))
    assert wasteful.beyond == pytest.approx(16 / 10 - 1)
    assert wasteful.over_visible == pytest.approx(512**2 / (512 * 513 / 2))


def test_launches_of_the_whole_problem() -> None:
    """Tiles of unequal work are taken from a counter where there are many."""
    counted = PassCount(Head("forward", 64, 64, MaskSpec(right=0), 8192), 192, 128, ())
    assert planned_launches(counted, 1, 1) == 1
    assert planned_launches(counted, 2, 32) == 2


def test_records_are_read_back() -> None:
    found = count_ours(Head("forward", 64, 64, MaskSpec(100, 0), 256))
    assert from_json(json.loads(json.dumps(as_json(found)))) == found


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)} not installed")
def test_flash_attention_4_is_counted_alike(tmp_path: Path) -> None:
    """Its tiles hold a visible pair each, and load what they need once."""
    out = tmp_path / "peer.json"
    command = [sys.executable, "-m", "profiling.peer_counters", "700", "64", str(out)]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": path})
    found = [from_json(record) for record in json.loads(out.read_text())]
    assert [each.head for each in found] == heads([64], 700)
    for each in found:
        assert each.beyond == pytest.approx(0.0)
        assert each.loads_per_tile == pytest.approx(1.0, rel=0.01)
        assert len(each.launches) == (1 if each.head.direction == "forward" else 3)
