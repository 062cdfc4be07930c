"""The counts of both packages as a Markdown page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from profiling.compare_counters import BATCH, HIDDEN, Pair
from profiling.compare_report import commit
from profiling.compare_sass import WINDOW_LEFT
from profiling.counters import PassCount, planned_launches

GB = 1e9
INTRO = f"""# Counters beside flash-attn-4's

`python -m profiling.compare_counters` wrote this page: the compiled kernels of both packages, with
their own host code, executed in [the emulator](../emulator.md), bf16. Counts are for
{BATCH} x {HIDDEN} / head_dim heads, which all do the same; of one head so many CTAs are executed
as stand for all (`profiling/counters.py`), and the sums are exact. Windows are of
{WINDOW_LEFT} keys to the left.

- **loads**: how often the blocks that a step streams are read from global memory for each tile with
  a visible pair: K and V of a forward, Q, dO and the row statistics of a backward. 1 where each
  tile loads its own, below where CTAs of a cluster share them.
- **beyond**: FLOPs of the tensor cores beyond those of the tiles with a visible pair, over the
  latter: what is multiplied for nothing.
- **FLOPs**: of the tensor cores over those of the visible pairs; more by the hidden pairs of tiles
  that the mask or the end of the sequence cuts.
- **read**, **written**, **reduced**: GB that all launches of a pass ask of global memory, before
  any cache; reduced are sums of dQ added there, by TMA or by threads.
- **launches**: of kernels, and of what zeroes the counter from which CTAs take tiles one by one;
  the 4 bytes that each tile then adds to it are left out.
"""
HEADER = (
    "| case | tile ours | FA4 | loads ours | FA4 | beyond ours | FA4 | FLOPs ours | FA4"
    " | read ours | FA4 | written ours | FA4 | reduced ours | FA4 | all bytes, ratio"
    " | launches ours | FA4 |\n" + "| --- " * 18 + "|"
)


class Threshold(NamedTuple):
    """What a figure of ours may be at most."""

    what: str
    case: str
    limit: float
    found: float
    tiles: str
    """Of both sides, where they differ: the cause of most differences."""

    @property
    def holds(self) -> bool:
        return self.found <= self.limit


def write(pairs: Sequence[Pair], folder: Path) -> Path:
    """`counters.md` in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / "counters.md"
    page.write_text("\n".join(lines(pairs)) + "\n")
    return page


def lines(pairs: Sequence[Pair]) -> Iterator[str]:
    """The page."""
    yield INTRO
    lengths = sorted({pair.head.seqlen for pair in pairs})
    yield (
        f"{', '.join(map(str, lengths))} queries and keys; hopperflash {commit()},"
        f" flash-attn-4 {version('flash-attn-4')}."
    )
    for direction in ("forward", "backward"):
        yield f"\n## {direction.capitalize()}\n\n{HEADER}"
        yield from (_row(pair) for pair in pairs if pair.head.direction == direction)
    yield "\n## Thresholds\n\n| | case | at most | found | |\n| --- | --- | --- | --- | --- |"
    for t in thresholds(pairs):
        verdict = "" if t.holds else f"**missed**{t.tiles}"
        yield f"| {t.what} | {t.case} | {t.limit:g} | {t.found:.4f} | {verdict} |"


def _row(pair: Pair) -> str:
    sides = (pair.ours, pair.peer)
    moved = [
        f"{_sum(side, kind) * pair.copies / GB:.3f}"
        for kind in ("read", "written", "reduced")
        for side in sides
    ]
    cells = [
        pair.name,
        *(f"{side.tile_m}x{side.tile_n}" for side in sides),
        *(f"{side.loads_per_tile:.3g}" for side in sides),
        *(f"{100 * side.beyond:.1f} %" for side in sides),
        *(f"{side.over_visible:.3f}" for side in sides),
        *moved,
        f"{pair.bytes_ratio:.4f}",
        str(planned_launches(pair.ours, BATCH, HIDDEN // pair.head.head_dim)),
        str(len(pair.peer.launches)),
    ]
    return "| " + " | ".join(cells) + " |"


def _sum(side: PassCount, kind: str) -> int:
    return sum(getattr(launch, kind) for launch in side.launches)


def thresholds(pairs: Sequence[Pair]) -> Iterator[Threshold]:
    """Every goal of the project and what was found, case by case."""
    for pair in pairs:
        case = f"{pair.head.direction} {pair.name}"
        ours, peer = (f"{side.tile_m}x{side.tile_n}" for side in pair)
        tiles = "" if ours == peer else f": tile {ours}, FA4's {peer}"
        yield Threshold("tensor work beyond", case, 0.0, pair.ours.beyond, tiles)
        yield Threshold("all bytes, ratio", case, 1.0, pair.bytes_ratio, tiles)
