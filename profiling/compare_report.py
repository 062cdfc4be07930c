"""The comparison with flash-attn-4 as a Markdown page and a plot."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from hopperflash.analysis.loop_cost import StepCost
from hopperflash.problem import MaskKind
from profiling.compare_sass import SEQLEN, WINDOW_LEFT, Case, Pair, Side

INTRO = f"""# Machine code beside flash-attn-4's

`python -m profiling.compare_sass` wrote this page: both packages' kernels compiled for sm_90a in
one run, bf16, without a GPU. Ratios are ours over flash-attn-4's: below 1 we need less.

- **interior**, **boundary**: instructions of a thread in one step of the loop over its scores: of
  every step, and behind a plus of some (one lane's arrival at a barrier; ours rescale O where a row
  of the warp has a new maximum). Ratios are of the former. Interior steps need no mask; boundary
  steps are those of the dearest loop. Where a kernel masks every block, its interior steps are
  marked `m`.
- **bound**: clocks that an SM needs for 1000 visible pairs, by [the model](../performance.md) from
  the machine code, for one head of {SEQLEN} queries and keys (window: {WINDOW_LEFT} keys to the
  left). The unit named bounds the interior steps.
- **L2**: bytes a clock that an SM asks of L2 in the interior; about 32 is what it can get.
"""
HEADER = (
    "| case | tile ours | FA4 | interior ours | FA4 | ratio | boundary ours | FA4 | ratio"
    " | bound ours | FA4 | ratio | L2 ours | FA4 |\n" + "| --- " * 14 + "|"
)


class Threshold(NamedTuple):
    """What a ratio may be at most, for some cases."""

    what: str
    cases: str
    limit: float
    found: float

    @property
    def holds(self) -> bool:
        return round(self.found, 3) <= self.limit


def write(pairs: list[Pair], folder: Path) -> list[Path]:
    """`sass.md` and `sass.svg` in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    page, picture = folder / "sass.md", folder / "sass.svg"
    page.write_text("\n".join(lines(pairs)) + "\n")
    plot(pairs, picture)
    return [page, picture]


def lines(pairs: list[Pair]) -> Iterator[str]:
    """The page."""
    yield INTRO
    yield from _origin(pairs)
    for direction in ("forward", "backward"):
        yield f"\n## {direction.capitalize()}\n\n{HEADER}"
        yield from (_row(pair) for pair in pairs if pair.case.direction == direction)
    yield "\n![Ratios of instructions and bounds](sass.svg)"
    yield "\n## Thresholds\n\n| ratio | case | at most | found | |\n| --- | --- | --- | --- | --- |"
    for t in thresholds(pairs):
        verdict = "" if t.holds else "**missed**"
        yield f"| {t.what} | {t.cases} | {t.limit:g} | {t.found:.3f} | {verdict} |"


def _origin(pairs: list[Pair]) -> Iterator[str]:
    yield (
        f"hopperflash {commit()}, flash-attn-4 {version('flash-attn-4')};"
        f" nvidia-cutlass-dsl {version('nvidia-cutlass-dsl')}"
        f" (ptxas and NVVM {compiler_versions()})."
    )
    sides = [side for pair in pairs for side in (pair.ours, pair.peer)]
    spilling = sum(bool(side.spill_bytes or side.stack_bytes) for side in sides)
    serialised = sum(step.serialised for side in sides for step in side.steps)
    yield (
        f"{len(sides)} kernels: {spilling} with spills or a stack,"
        f" {serialised} loops with serialised wgmma."
    )


def commit() -> str:
    """The commit of the checkout, or the version where there is none."""
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or version("hopperflash")


def compiler_versions() -> str:
    """The CUDA releases of the compilers that the DSL holds: ptxas, and NVVM before it."""
    import cutlass._mlir._mlir_libs as libraries

    found: set[bytes] = set()
    for library in Path(libraries.__path__[0]).glob("_cutlass_ir*.so"):
        found.update(re.findall(rb"tools, release [0-9.]+, V([0-9.]+)", library.read_bytes()))
    return " and ".join(sorted(text.decode() for text in found))


def _row(pair: Pair) -> str:
    ours, peer = pair.ours, pair.peer
    boundary = "-" if pair.boundary is None else f"{pair.boundary:.2f}"
    cells = [
        pair.case.name,
        *(f"{side.tile_m}x{side.tile_n}" for side in (ours, peer)),
        *(_interior(side) for side in (ours, peer)),
        f"{pair.interior:.2f}",
        *(_boundary(side) for side in (ours, peer)),
        boundary,
        *(_bound(side) for side in (ours, peer)),
        f"{pair.bound:.2f}",
        *(f"{side.l2_rate:.1f}" for side in (ours, peer)),
    ]
    return "| " + " | ".join(cells) + " |"


def _interior(side: Side) -> str:
    mark = " m" if side.masks_always else ""
    return f"{_instructions(side.interior)}{mark}"


def _boundary(side: Side) -> str:
    return _instructions(side.boundary) if side.boundary.masked else "-"


def _instructions(step: StepCost) -> str:
    beyond = step.per_score - step.always_per_score
    return f"{step.always_per_score:.2f}" + (f" + {beyond:.2f}" if beyond else "")


def _bound(side: Side) -> str:
    return f"{side.clocks:.1f} {side.interior.units.bound.unit}"


def thresholds(pairs: Iterable[Pair]) -> Iterator[Threshold]:
    """Every goal of the project and what was found, case by case."""
    for pair in pairs:
        case = f"{pair.case.direction} {pair.case.name}"
        yield Threshold("bound", case, _bound_limit(pair.case), pair.bound)
        yield Threshold("interior", case, _interior_limit(pair.case), pair.interior)
        if pair.boundary is not None:
            yield Threshold("boundary", case, 1.0, pair.boundary)
        asked = pair.case.direction == "forward" and pair.case.head_dim >= 128
        if asked and pair.case.mask is not MaskKind.WINDOW:
            yield Threshold("L2, B a clock", case, 24.0, pair.ours.l2_rate)


def _bound_limit(case: Case) -> float:
    if case.direction == "forward":
        return 0.92 if case.head_dim == 64 else 1.0
    return {192: 1.0, 256: 0.83}.get(case.head_dim, 0.95)


def _interior_limit(case: Case) -> float:
    if case.direction == "backward":
        return 1.0
    return 0.95 if case.head_dim <= 128 else 0.85


def plot(pairs: list[Pair], path: Path) -> None:
    """Ratios case by case: instructions of interior and boundary steps, and the bound."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    directions = sorted({pair.case.direction for pair in pairs}, reverse=True)
    figure, all_axes = plt.subplots(1, len(directions), figsize=(11, 6), squeeze=False)
    for axes, direction in zip(all_axes[0], directions, strict=True):
        shown = [pair for pair in pairs if pair.case.direction == direction][::-1]
        rows = range(len(shown))
        for marker, label, values in (
            ("o", "instructions, interior", [pair.interior for pair in shown]),
            ("^", "instructions, boundary", [pair.boundary for pair in shown]),
            ("s", "bound for a visible pair", [pair.bound for pair in shown]),
        ):
            found = [(v, r) for v, r in zip(values, rows, strict=True) if v is not None]
            axes.plot(*zip(*found, strict=True), marker, label=label, alpha=0.8)
        axes.axvline(1.0, color="black", linewidth=0.8)
        axes.set_yticks(rows, [pair.case.name for pair in shown])
        axes.set_title(f"{direction}: ours / flash-attn-4")
        axes.grid(axis="x", alpha=0.3)
    all_axes[0][0].legend(loc="best", fontsize="small")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
