"""What `profiling/stored_vs_recomputed.py` found, as a page and a plot."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch

from hopperflash.bench.plot import HEIGHT, WIDTH, Point, line_chart

WAYS = ("stored", "recomputed")
RMS_ALLOWED = 0.02  # of the gradient's own; bf16 has 2^-9 a rounding
# An H100 SXM: its data sheet's bytes a second of memory, and dense 16-bit FLOP a second.
BANDWIDTH, PEAK = 3.35e12, 989e12

PAGE, PLOT = "stored_vs_recomputed.md", "stored_vs_recomputed.svg"
INTRO = """\
# A stored backward against a recomputed one

`python -m profiling.stored_vs_recomputed --write docs` wrote this page and its plot.

Batch 2, 16 heads, head dim 64, bf16, no mask; both ways get the same operands and the same dO.
"stored" keeps the probabilities of the forward and multiplies matrices; "recomputed" is
`hopperflash.flash_attn_func`, which keeps the log-sum-exp of each row and computes the
probabilities again, tile by tile. Every case runs in a process of its own. Seconds are the median
of the backward alone; peak memory is what forward and backward added to the process, or to the
allocator of a GPU.
"""
MODEL = """\
## Bytes and FLOP of the Hopper kernels, by the model

The [byte model](io.md), which is exact before the cache, behind the L2 of an H100. FLOP are those
of the products: four, and a fifth where the scores are computed again. The floor is the longer of
what the bytes take at 3.35 TB/s and the FLOP at 989 TFLOP/s. Nothing here was measured on a GPU.
"""


@dataclass(frozen=True)
class Measurement:
    """One way at one length; `errors` are those of dQ, dK and dV, relative RMS."""

    seqlen: int
    way: str
    device: str
    seconds: float
    peak_bytes: int
    moved_bytes: int
    flops: int
    errors: tuple[float, float, float]

    @property
    def right(self) -> bool:
        return max(self.errors) <= RMS_ALLOWED

    @property
    def floor(self) -> float:
        """Seconds that an H100 needs at least, by the model."""
        return max(self.moved_bytes / BANDWIDTH, self.flops / PEAK)


Value = Callable[[Measurement], float]


def circumstances(device: str, repeat: int) -> str:
    """When, where and beside what else; to be asked before the work begins."""
    name = torch.cuda.get_device_name() if device == "cuda" else _processor()
    load = os.getloadavg()[0]
    return (
        f"{date.today()}, {name}, {os.cpu_count()} cores, torch {torch.__version__} with"
        f" {torch.get_num_threads()} threads, load {load:.1f} before, median of {repeat}"
    )


def crossover(found: Sequence[Measurement], value: Value) -> int | None:
    """The length from which on the recomputed backward is better at every length measured."""
    pairs: dict[int, dict[str, float]] = {}
    for one in found:
        pairs.setdefault(one.seqlen, {})[one.way] = value(one)
    first = None
    for seqlen in sorted(pairs, reverse=True):
        if pairs[seqlen]["recomputed"] > pairs[seqlen]["stored"]:
            break
        first = seqlen
    return first


def measured(found: Sequence[Measurement], where: str) -> Iterator[str]:
    """What this machine said: a row for each length."""
    yield f"{where}.\n"
    columns = (
        Column("seconds", "latency", lambda one: one.seconds, ".3g"),
        Column("peak MB", "peak memory", lambda one: one.peak_bytes / 1e6, ",.0f"),
    )
    yield from table(found, columns)
    worst = max(max(one.errors) for one in found)
    yield (
        f"\nGradients of both ways at every length are within {100 * worst:.2g} % (RMS) of fp64,"
        f" over one head; {100 * RMS_ALLOWED:.0f} % ends the run."
    )


def modelled(found: Sequence[Measurement], least: int) -> Iterator[str]:
    """What follows from sizes alone; from length `least` on recomputing moves less."""
    columns = (
        Column("moved MB", "traffic", lambda one: one.moved_bytes / 1e6, ",.1f"),
        Column("GFLOP", "arithmetic", lambda one: one.flops / 1e9, ",.1f"),
        Column("floor, µs", "floor", lambda one: one.floor * 1e6, ",.1f"),
    )
    yield from table(found, columns)
    yield f"\nOf all lengths in steps of 8, it has the lower traffic from {least:,} on."


@dataclass(frozen=True)
class Column:
    """A value of both ways; `what` it is called in a sentence."""

    title: str
    what: str
    value: Value
    form: str


def table(found: Sequence[Measurement], columns: Sequence[Column]) -> Iterator[str]:
    """Markdown, and the length from which on recomputing needs less of each."""
    titles = [f"{column.title} stored | recomputed | ratio" for column in columns]
    yield f"| length | {' | '.join(titles)} |"
    yield "| ---: " * (1 + 3 * len(columns)) + "|"
    by_case = {(one.seqlen, one.way): one for one in found}
    for seqlen in sorted({one.seqlen for one in found}):
        cells = [f"{seqlen:,}"]
        for column in columns:
            first, second = (column.value(by_case[seqlen, way]) for way in WAYS)
            cells += [f"{first:{column.form}}", f"{second:{column.form}}", f"{first / second:.2f}"]
        yield f"| {' | '.join(cells)} |"
    yield ""
    for column in columns:
        length = crossover(found, column.value)
        words = "at no length of these" if length is None else f"from {length:,} on"
        yield f"- Recomputing has the lower {column.what} {words}."


def page(found: Sequence[Measurement], where: str, least: int) -> str:
    """The whole page."""
    return "\n".join(
        (
            INTRO,
            "## Measured\n",
            *measured(found, where),
            f"\n![Seconds and peak memory by length]({PLOT})\n",
            MODEL,
            *modelled(found, least),
            "",
        )
    )


def plot(found: Sequence[Measurement]) -> str:
    """Seconds above peak memory, as one SVG that needs no page's colours."""
    lengths = sorted({one.seqlen for one in found})
    panels: list[tuple[str, Value]] = [
        ("seconds of a backward, by length", lambda one: one.seconds),
        ("peak memory in MB, by length", lambda one: one.peak_bytes / 1e6),
    ]
    parts = [_STYLE.format(width=WIDTH, height=len(panels) * HEIGHT + _LEGEND)]
    for number, way in enumerate(WAYS):
        at = f'x="{60 + 130 * number}" y="18" class="s{number}"'
        parts.append(f'<text {at} style="fill: currentColor">● {way}</text>')
    for number, (unit, value) in enumerate(panels):
        series = {
            way: (colour, [_point(lengths, one, value) for one in found if one.way == way])
            for colour, way in enumerate(WAYS)
        }
        chart = line_chart([f"{length:,}" for length in lengths], series, unit)
        place = f'<svg y="{_LEGEND + number * HEIGHT}" height="{HEIGHT}"'
        parts.append(chart.replace("<svg", place, 1))
    return "\n".join([*parts, "</svg>\n"])


def write(found: Sequence[Measurement], where: str, least: int, folder: Path) -> None:
    """Page and plot."""
    (folder / PAGE).write_text(page(found, where, least))
    (folder / PLOT).write_text(plot(found))


def refresh(found: Sequence[Measurement], least: int, folder: Path) -> None:
    """The model's half of the page anew."""
    path = folder / PAGE
    kept = path.read_text().split(MODEL.splitlines()[0])[0]
    path.write_text(kept + "\n".join((MODEL, *modelled(found, least), "")))


_LEGEND = 28
_STYLE = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">
<style>
svg {{ color: #1d2328; font: 12px sans-serif; }} text {{ fill: currentColor; }}
.end {{ text-anchor: end; }} .middle {{ text-anchor: middle; }} .grid {{ stroke: #8b949e55; }}
.s0 {{ color: #d55e00; }} .s1 {{ color: #0072b2; }}
g polyline {{ fill: none; stroke: currentColor; stroke-width: 2; }}
g line {{ stroke: currentColor; }} g circle {{ fill: currentColor; }}
@media (prefers-color-scheme: dark) {{
  svg {{ color: #e4e7ea; }} .s0 {{ color: #ff9d57; }} .s1 {{ color: #62b6ec; }}
}}
</style>"""


def _point(lengths: list[int], one: Measurement, value: Value) -> Point:
    return Point(lengths.index(one.seqlen), value(one), value(one), value(one))


def _processor() -> str:
    """The CPU's own name, where Linux tells it."""
    told = Path("/proc/cpuinfo")
    names = [line for line in told.read_text().splitlines() if line.startswith("model name")]
    return names[0].split(":", 1)[1].strip() if names else platform.machine()
