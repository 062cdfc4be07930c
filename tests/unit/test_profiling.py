"""What `profiling/` computes without a GPU, a compiler or a peer."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest

from hopperflash.analysis import KernelResources
from hopperflash.analysis.sass import parse_listing
from hopperflash.plan.config import Scheduler
from hopperflash.plan.cost import moved_bytes
from hopperflash.plan.tiles_sm90 import forward_config, forward_tile
from hopperflash.problem import MaskKind, MaskSpec
from profiling import (
    compare_counters,
    compare_report,
    compare_sass,
    counters_report,
    peer_tiles,
    schedules,
)
from profiling.compare_sass import SEQLEN, Case, Pair, cases, side
from profiling.counters import Head, LaunchCount, PassCount

ROOT = Path(__file__).parents[2]


def test_the_model_meets_published_speeds():
    errors = peer_tiles.relative_errors()
    assert len(errors) == 8
    assert peer_tiles.root_mean_square(errors) < 0.08
    assert max(map(abs, errors)) < 0.15


def test_the_documented_schedules_are_current():
    page = (ROOT / "docs" / "scheduling.md").read_text()
    assert "\n".join(schedules.table()) in page


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("seqlen", schedules.SEQLENS)
def test_the_chosen_scheduler_never_loses_to_single_tiles(seqlen, causal):
    shares, chosen = schedules.busy(seqlen, causal)
    by_name = dict(zip((scheduler for _, scheduler, _ in schedules.ORDERS), shares, strict=True))
    assert by_name[chosen] >= max(shares[:2])


def test_a_makespan_by_hand():
    alone, behind = schedules.ALONE_CLOCKS, schedules.BEHIND_ANOTHER_CLOCKS
    tiles = [2.0] * schedules.SMS + [1.0]
    assert schedules.makespan(tiles, Scheduler.SINGLE) == 3.0 + 2 * alone
    assert schedules.makespan(tiles, Scheduler.PERSISTENT) == 3.0 + alone + behind


def test_the_fitted_clock_is_the_best():
    clock = peer_tiles.fitted_clock()

    def error(gigahertz: float) -> float:
        return sum(
            (p.at_one_gigahertz * gigahertz / p.tflops - 1) ** 2 for p in peer_tiles.PUBLISHED
        )

    assert error(clock) < min(error(clock * 1.01), error(clock / 1.01))


def test_the_documented_predictions_are_current():
    page = (ROOT / "docs" / "performance.md").read_text()
    assert "\n".join(peer_tiles.table()) in page


def kernel(*extra: str) -> KernelResources:
    """Two loops, the first of which selects as often as a thread has scores."""
    loops = {"A": ["FSEL R1, R1, -INF, P0"] * 64, "B": list(extra)}
    lines, address = ["\t.section\t.text.kernel"], 0
    for name, body in loops.items():
        lines.append(f".L_{name}:")
        code = ["HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], RZ", *body]
        code += ["MUFU.EX2 R4, R4"] * 64 + [f"@P0 BRA `(.L_{name})"]
        for text in code:
            lines.append(f"        /*{address:04x}*/  {text} ;")
            address += 16
    listing = parse_listing("\n".join(lines))["kernel"]
    return KernelResources("kernel", 168, 0, 0, 1024, listing)


def pair(mask: MaskKind) -> Pair:
    case = Case("forward", 128, 128, mask)
    config = forward_config(forward_tile(128, 128, MaskKind.CAUSAL), 128, 128)
    ours, peer = (
        side(case, config, kernel(*extra), moved_bytes(config, 2))
        for extra in ([], ["FADD R1, R1, R2"] * 2)
    )
    return Pair(case, ours, peer)


def test_a_pair_compares_steps_of_a_kind():
    found = pair(MaskKind.CAUSAL)
    assert found.interior == 66 / 68
    assert found.boundary == 1.0
    assert found.bound == 1.0
    assert (found.ours.interior.masked, found.ours.boundary.masked) == (False, True)


def test_clocks_are_those_of_visited_blocks():
    """Full: every block costs what L2 takes for it, of 128 x 128 visible pairs."""
    clocks = 128 * 256 * 2 / 32
    assert pair(MaskKind.FULL).ours.clocks == pytest.approx(1000 * clocks / 128**2)
    blocks = SEQLEN // 128
    visited, pairs = blocks * (blocks + 1) // 2, SEQLEN * (SEQLEN + 1) // 2
    causal = pair(MaskKind.CAUSAL).ours.clocks
    assert causal == pytest.approx(1000 * clocks * visited / pairs)


def test_every_case_is_compared():
    assert len({(case.direction, case.name) for case in cases()}) == len(cases()) == 36


def test_the_page_has_a_row_and_a_verdict_for_each_case(monkeypatch):
    monkeypatch.setattr(
        compare_report, "version", lambda name: "0" if "4" in name else version(name)
    )
    monkeypatch.setattr(compare_report, "compiler_versions", lambda: "1.2")
    page = "\n".join(compare_report.lines([pair(MaskKind.CAUSAL), pair(MaskKind.WINDOW)]))
    assert "| 128 causal | 128x128 | 128x128 | 1.03 | 1.06 | 0.97 |" in page
    assert "| interior | forward 128 causal | 0.95 | 0.971 | **missed** |" in page
    assert "| bound | forward 128 causal | 1 | 1.000 |  |" in page
    assert "| L2, B a clock | forward 128 window" not in page


def test_the_plot_is_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    compare_report.plot([pair(MaskKind.CAUSAL)], tmp_path / "plot.svg")
    assert "</svg>" in (tmp_path / "plot.svg").read_text()


def test_counters_are_of_the_whole_problem(monkeypatch):
    """A head's loads, bytes and tensor work, times 2 x 32 heads; 10 of 16 tiles see a key."""
    monkeypatch.setattr(
        counters_report, "version", lambda name: "0" if "4" in name else version(name)
    )
    head = Head("forward", 64, 64, MaskSpec(right=0), 512)
    rows, tile = 512 * 64 * 2, 128 * 64 * 2
    flops = 10 * 2 * 2 * 64 * 128**2
    ours = LaunchCount(4, rows + 10 * 2 * tile, rows, 0, flops)
    peer = ours._replace(read=ours.read - tile, flops=flops * 16 // 10)
    sides = (PassCount(head, 128, 128, (found,)) for found in (ours, peer))
    pair = compare_counters.Pair(*sides)
    page = "\n".join(counters_report.lines([pair]))
    gb = [f"{64 * found.read / 1e9:.3f}" for found in (ours, peer)]
    assert f"| 1 | 0.95 | 0.0 % | 60.0 % | 1.248 | 1.996 | {gb[0]} | {gb[1]} |" in page
    assert "| all bytes, ratio | forward 64 causal | 1 | 1.0370 | **missed** |" in page
    assert "| tensor work beyond | forward 64 causal | 0 | 0.0000 |  |" in page
    wider = compare_counters.Pair(replace(pair.ours, tile_n=256), pair.peer)
    missed = "| 1 | 1.0370 | **missed**: tile 128x256, FA4's 128x128 |"
    assert missed in "\n".join(counters_report.lines([wider]))


def test_head_dims_are_chosen_by_name(capsys, monkeypatch):
    assert compare_sass.head_dims_of("64,192/128") == ((64, 64), (192, 128))
    assert compare_sass.head_dims_of(compare_sass.ALL_HEAD_DIMS) == compare_sass.HEAD_DIMS
    monkeypatch.setattr("sys.argv", ["compare_counters", "--head-dims", "64,80,72/8"])
    with pytest.raises(SystemExit):
        compare_counters.main()
    assert "no head dims 80, 72/8: there are 64, 96, 128, 192/128" in capsys.readouterr().err
