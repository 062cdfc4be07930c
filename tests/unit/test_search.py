"""The search of tiles: what it enumerates, drops and ranks, and how its date gets into a table."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from hopperflash.analysis import KernelReport
from hopperflash.analysis.loop_cost import StepCost
from hopperflash.plan import KernelSpec, arch_of
from hopperflash.plan.config import BackwardConfig, ForwardConfig, POperand, Scheduler
from hopperflash.plan.units import UnitClocks
from hopperflash.problem import GRADIENTS, DType, MaskKind
from profiling import search as module
from profiling.candidates import candidate_of, enumerate_rows, table_of
from profiling.check_tiles import Verdict, dated, rows_of
from profiling.compare_sass import Case
from profiling.search import (
    Question,
    Ranking,
    as_json,
    faults_of,
    lines,
    search,
    with_l2_at_ease,
)

SM90, SM80 = arch_of("sm_90a"), arch_of("sm_80")
CAUSAL_128 = Case("forward", 128, 128, MaskKind.CAUSAL)


def step(per_score: float = 6.0, *, masked: bool = False, serialised: bool = False) -> StepCost:
    """A loop whose tensor cores are busy for 2048 clocks."""
    return StepCost(
        begin=0, masked=masked, instructions=0, per_score=per_score, always_per_score=per_score,
        pipes={}, conditional=0, tensor_shapes={}, exponentials_beyond=0, warpgroup_syncs=0,
        serialised=serialised, spills=0, units=UnitClocks(2048, 0, 0, 0, 0, 0, 0),
    )  # fmt: skip


def compiled(*steps: StepCost, spill_bytes: int = 0, stack_bytes: int = 0) -> KernelReport:
    return KernelReport(
        "kernel", "sm_90a", 168, stack_bytes, spill_bytes, 1 << 17, 384, steps, None
    )


class Here:
    """A pool that works in this process."""

    map = staticmethod(map)


@pytest.fixture
def ranking(monkeypatch: pytest.MonkeyPatch):
    """The search of a forward at head dim 128, given what compiling does."""

    def found(compile_report: Any, case: Case = CAUSAL_128, **options: Any) -> Ranking:
        monkeypatch.setattr(module, "compile_report", compile_report)
        pool: Any = Here()
        return search(Question(case, SM90, **options), 8, pool)

    return found


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("arch", [SM90, SM80], ids=["sm_90a", "sm_80"])
def test_every_planned_row_is_enumerated(arch, direction):
    rows = list(rows_of(arch, direction))
    assert {row.place for row in rows}
    for row in rows:
        planned = candidate_of(row.tile, row.case, table_of(direction, arch))
        assert planned in enumerate_rows(row.case, arch), row


def test_only_what_is_feasible_is_enumerated():
    found = enumerate_rows(CAUSAL_128, SM90)
    check = table_of("forward", SM90).check
    assert len(set(found)) == len(found) > 20
    assert all(check(each.config, SM90, DType.BFLOAT16) for each in found)
    tiles = {(each.config.tile_m, each.config.tile_n) for each in found}
    assert (128, 176) in tiles
    assert (128, 192) in tiles
    assert (128, 208) not in tiles


def test_of_stages_the_most_are_taken():
    found = enumerate_rows(Case("backward", 64, 64, MaskKind.FULL), SM90)
    apart = [tuple(item for item in each.row if item[0] != "stages") for each in found]
    assert len(set(apart)) == len(apart)
    assert ("stages", 2) in found[0].row


def test_more_clocks_rank_behind_whatever_the_order(monkeypatch, ranking):
    """All loops alike: what differs are the blocks that the diagonal cuts."""
    one = ranking(lambda spec: compiled(step(), step(8.0, masked=True)))
    backwards = enumerate_rows(CAUSAL_128, SM90)[:8][::-1]
    monkeypatch.setattr(module, "enumerate_rows", lambda *_: backwards)
    other = ranking(lambda spec: compiled(step(), step(8.0, masked=True)))
    assert one.ranked == other.ranked
    clocks = [found.side.clocks for found in one.ranked if found.side]
    assert clocks == sorted(clocks)
    assert one.behind(0) == 0.0
    assert one.planned_place is not None
    assert one.ranked[one.planned_place].candidate.config.tile_n == 128


def test_instructions_break_ties(ranking):
    """The same clocks a pair for every tile, P from shared memory the cheaper."""

    def compile_report(spec: KernelSpec) -> KernelReport:
        assert isinstance(spec.config, ForwardConfig)
        shared = spec.config.p_operand is POperand.SHARED
        idle = replace(step(5.0 if shared else 6.0), units=UnitClocks(*[0.0] * 7))
        return compiled(idle)

    found = ranking(compile_report)
    operands = [each.candidate.config.p_operand for each in found.ranked]
    assert operands == sorted(operands, key=lambda operand: operand is POperand.REGISTERS)


def test_what_is_asked_of_l2_beyond_ease_may_count_as_waiting(ranking):
    """At 32 bytes a clock L2's 1800 clocks are hidden; at 24 they are 2400. Others have 1500."""

    def compile_report(spec: KernelSpec) -> KernelReport:
        l2 = 1800 if spec.config.tile_n == 128 else 1500
        return compiled(replace(step(), units=UnitClocks(2048, 0, 0, 0, 0, 0, l2)))

    found = ranking(compile_report)
    pool: Any = Here()
    eased = with_l2_at_ease(found, pool)
    assert {each.candidate for each in eased.ranked} == {each.candidate for each in found.ranked}
    assert {each.side.interior.units.bound.unit for each in found.ranked} == {"tensor cores"}
    bounds = {
        each.candidate.config.tile_n == 128: each.side.interior.units.bound for each in eased.ranked
    }
    assert bounds == {True: ("L2", 2400), False: ("tensor cores", 2048)}


def test_what_spills_is_dropped(ranking):
    def compile_report(spec: KernelSpec) -> KernelReport:
        return compiled(step(), spill_bytes=16 if spec.config.tile_n > 100 else 0)

    found = ranking(compile_report)
    assert {each.candidate.config.tile_n > 100 for each in found.ranked} == {False}
    assert all(each.faults == ("16 B spilled",) for each in found.dropped)
    assert found.planned_place is None
    page = "\n".join(lines(found, markdown=False))
    assert "dropped* 128x128, p_operand registers: 16 B spilled" in page


def test_faults_name_each_reason():
    bad = compiled(step(serialised=True), spill_bytes=4, stack_bytes=8)
    assert faults_of(bad) == ("4 B spilled", "8 B of stack", "wgmma serialised")
    assert faults_of("RuntimeError: no") == ("does not compile: RuntimeError: no",)
    assert faults_of(compiled(step())) == ()


@pytest.mark.parametrize("plain", [True, False])
def test_the_first_is_clean_with_everything(ranking, plain):
    """Packed and in order the best tile spills, which then is first only where one of them will
    do."""
    tried: set[tuple[bool, ...]] = set()

    def compile_report(spec: KernelSpec) -> KernelReport:
        config, signature = spec.config, spec.signature
        assert isinstance(config, BackwardConfig)
        best = (config.tile_m, config.tile_n) == (64, 128) and config.dq_warpgroups == 1
        several = config.scheduler is Scheduler.PERSISTENT
        fewer = config.gradients != GRADIENTS
        tried.add((signature.softcap, signature.packed, config.deterministic, several, fewer))
        units = UnitClocks(*[0.0 if best else 2048.0] * 7)
        spilling = signature.packed and config.deterministic and best
        return compiled(replace(step(), units=units), spill_bytes=8 * spilling)

    found = ranking(compile_report, replace(CAUSAL_128, direction="backward"), plain=plain)
    texts = [fault for each in found.dropped for fault in each.faults]
    assert set(texts) == (set() if plain else {"with everything: 8 B spilled"})
    assert (found.ranked[0].candidate == found.planned) == plain
    everything, packed_in_order = (True, True, True, True, False), (False, True, True, False, False)
    assert ({everything, packed_in_order} <= tried) != plain


@pytest.mark.parametrize("head_dim", [64, 192])
def test_rows_for_plain_problems_are_asked_no_more(head_dim):
    rows = [row for row in rows_of(SM90, "backward") if row.tile.head_dim == head_dim]
    assert {row.plain for row in rows} == {True, False}
    assert all(row.plain == row.tile.plain_only for row in rows)


def test_forms_of_a_ranking(ranking):
    found = ranking(lambda spec: compiled(step(), step(8.0, masked=True)))
    text, page = (list(lines(found, markdown)) for markdown in (False, True))
    assert "8 compiled, 0 dropped" in text[0]
    assert page[2].count("|") == page[1].count("|")
    assert sum("*" in line for line in text) == 1
    record = json.loads(json.dumps(as_json(found)))
    assert record["planned_place"] == found.planned_place
    assert record["ranked"][0]["row"]["p_operand"] in ("registers", "shared")


def test_verdicts(ranking):
    found = ranking(lambda spec: compiled(step()))
    assert found.planned_place is not None
    row = next(row for row in rows_of(SM90, "forward") if row.case == CAUSAL_128)

    def verdict(ranking: Ranking, margin: float) -> Verdict:
        return Verdict(row, found.planned, ranking, margin)

    behind = found.behind(found.planned_place)
    assert behind > 0
    assert verdict(found, behind).confirmed
    assert not verdict(found, behind / 2).confirmed
    assert str(verdict(found, behind / 2)).endswith(f"the row's reason: {row.tile.source}")
    alone = replace(found, ranked=found.ranked[found.planned_place :])
    assert "is the first choice" in str(verdict(alone, 0.0))
    gone = replace(found, ranked=found.ranked[: found.planned_place])
    assert not verdict(gone, 1.0).confirmed
    assert "DROPPED" in str(verdict(gone, 1.0))


def test_dates_are_set_in_the_rows():
    source = (
        "X = 1\n"
        'FORWARD_TILES = (\n    Tile(64, "a", plain_only=True),\n'
        '    Tile(\n        96, "b"\n    ),\n)\n'
        'BACKWARD_TILES = (Tile(64, "c", "2026-01-01"), Tile(96, "d"), Tile(8, "e", "old"))\n'
    )
    days = {("forward", 0): "2026-05-06", ("forward", 1): "2026-05-06", ("backward", 0): "",
            ("backward", 1): "", ("backward", 2): "2026-05-06"}  # fmt: skip
    new = dated(source, days)
    assert new == (
        "X = 1\n"
        'FORWARD_TILES = (\n    Tile(64, "a", "2026-05-06", plain_only=True),\n'
        '    Tile(\n        96, "b", "2026-05-06"\n    ),\n)\n'
        'BACKWARD_TILES = (Tile(64, "c"), Tile(96, "d"), Tile(8, "e", "2026-05-06"))\n'
    )
    assert dated(new, days) == new


@pytest.mark.parametrize("arguments", [["--write"], ["--check", "--write", "--arch", "sm_80"]])
def test_dates_are_of_checked_rows_of_hopper(arguments, capsys):
    with pytest.raises(SystemExit):
        module.main(arguments)
    assert "--write needs --check, and --arch sm_90a" in capsys.readouterr().err
