"""Whether the rows of a table of tiles are what the search finds, and when they last were."""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from datetime import date
from itertools import accumulate
from pathlib import Path
from typing import Any

from hopperflash.plan import ArchSpec, arch_of, tiles_sm90
from hopperflash.problem import MaskKind
from profiling.candidates import Candidate, candidate_of, table_of
from profiling.compare_sass import Case
from profiling.peer_tiles import relative_errors, root_mean_square
from profiling.search import Question, Ranking, search, with_l2_at_ease

DATED = {"forward": "FORWARD_TILES", "backward": "BACKWARD_TILES"}


@dataclass(frozen=True)
class Row:
    """The row of a table, by its place in it, for one of its masks."""

    direction: str
    place: int
    tile: Any
    mask: MaskKind
    plain: bool

    @property
    def case(self) -> Case:
        return Case(self.direction, self.tile.head_dim, self.tile.head_dim_v, self.mask)


@dataclass(frozen=True)
class Verdict:
    """What the search says of a row."""

    row: Row
    candidate: Candidate
    ranking: Ranking
    margin: float
    l2_at_ease: bool = False
    """Whether the candidates were ranked as if they waited for L2 beyond that."""

    @property
    def behind(self) -> float | None:
        """Clocks over those of the first choice, less one; None where the row was dropped."""
        place = self.ranking.planned_place
        return None if place is None else self.ranking.behind(place)

    @property
    def confirmed(self) -> bool:
        """Whether the row is as good as the first choice, as far as the model can tell."""
        return self.behind is not None and self.behind <= self.margin

    def __str__(self) -> str:
        name = f"{self.row.case.direction} {self.row.case.name}: {self.candidate.name}"
        if self.l2_at_ease:
            name += ", with L2 at ease,"
        if self.ranking.planned_place == 0:
            return f"{name} is the first choice"
        if not self.ranking.ranked:
            return f"{name} is dropped like all others"
        first = f"{self.ranking.ranked[0].candidate.name} is first"
        if self.behind is None:
            return f"{name} is DROPPED; {first}"
        text = f"{name} is {100 * self.behind:.1f} % behind; {first}"
        if self.confirmed:
            return f"{text}, which the model cannot tell apart"
        return f"{text}; the row's reason: {self.row.tile.source}"


def rows_of(arch: ArchSpec, direction: str) -> Iterator[Row]:
    """Every row of the table, once for each mask that problems of its own head dims get it for."""
    table = table_of(direction, arch)
    for place, tile in enumerate(table.rows(arch)):
        for mask in tile.masks:
            row = Row(direction, place, tile, mask, getattr(tile, "plain_only", False))
            if table.row_for(row.case, arch, row.plain) == tile:
                yield row


def verdicts(
    options: argparse.Namespace, margin: float, pool: ProcessPoolExecutor
) -> Iterator[Verdict]:
    """Of the rows that the options choose."""
    arch = arch_of(options.arch)
    for direction in [options.direction] if options.direction else DATED:
        for row in rows_of(arch, direction):
            if options.head_dim not in (None, row.tile.head_dim):
                continue
            ranking = search(Question(row.case, arch, row.plain), options.limit, pool)
            candidate = candidate_of(row.tile, row.case, table_of(direction, arch))
            verdict = Verdict(row, candidate, ranking, margin)
            if not verdict.confirmed:
                # What L2 really gives lies between its edge and ease: a row stands by either.
                ranking = with_l2_at_ease(ranking, pool)
                eased = replace(verdict, ranking=ranking, l2_at_ease=True)
                verdict = eased if eased.confirmed else verdict
            yield verdict


def check(options: argparse.Namespace, pool: ProcessPoolExecutor) -> None:
    """Prints a verdict for each row and mask, and with --write dates those rows whose masks all
    are confirmed."""
    margin = root_mean_square(relative_errors())
    print(f"margin: {100 * margin:.1f} %, the model's error on published speeds")
    found: dict[tuple[str, int], list[bool]] = {}
    for verdict in verdicts(options, margin, pool):
        print(verdict, flush=True)
        found.setdefault((verdict.row.direction, verdict.row.place), []).append(verdict.confirmed)
    if not options.write:
        return
    today = date.today().isoformat()
    path = Path(tiles_sm90.__file__)
    days = {key: today if all(masks) else "" for key, masks in found.items()}
    path.write_text(dated(path.read_text(), days))
    print(f"{sum(map(bool, days.values()))} of {len(days)} rows dated in {path}")


def dated(source: str, days: Mapping[tuple[str, int], str]) -> str:
    """The source of a table module with `searched` of rows, by direction and place, set to days."""
    starts = [0, *accumulate(len(line) for line in source.splitlines(keepends=True))]
    rows = {
        node.targets[0].id: node.value.elts
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Tuple)
        and isinstance(node.targets[0], ast.Name)
    }
    edits: list[tuple[int, int, str]] = []
    for (direction, place), day in days.items():
        call = rows[DATED[direction]][place]
        assert isinstance(call, ast.Call)
        # A row's texts are its source and, behind it, the day.
        source_text, *old = (arg for arg in call.args if _is_text(arg))
        end = _end(source_text, starts)
        new = f', "{day}"' if day else ""
        edits.append((end, _end(old[0], starts) if old else end, new))
    for begin, end, text in sorted(edits, reverse=True):
        source = source[:begin] + text + source[end:]
    return source


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _end(node: ast.expr, starts: Sequence[int]) -> int:
    """Where a node ends in a source whose lines start there."""
    assert node.end_lineno is not None and node.end_col_offset is not None
    return starts[node.end_lineno - 1] + node.end_col_offset
