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
from hopperflash.bench.timing import FLUSH_BYTES
from profiling.recomputation import WAYS
from profiling.recomputation_bytes import Counted

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
probabilities again, tile by tile. Every case runs in a process of its own. Seconds are those of the
backward alone; peak memory is what forward and backward added to the process, or to the allocator
of a GPU.

On a CPU the stored way multiplies in fp32, head by head, as the `cpu` backend does: PyTorch's own
product of bf16 matrices is many times slower there. On a GPU it is PyTorch's, calls are timed by
CUDA events, and `--ncu` adds DRAM's bytes by Nsight Compute ([profiling.md](profiling.md)).
"""
MODEL = """\
## Bytes and FLOP of the Hopper kernels, by the model

The [byte model](io.md) behind the L2 of an H100. FLOP are those of the products: four, and a fifth
where the scores are computed again. The floor is the longer of what the bytes take at 3.35 TB/s and
the FLOP at 989 TFLOP/s. Nothing here was measured on a GPU.
"""
EMULATED = """\
## Bytes that the emulator counted

Of the recomputed backward: its kernels executed, with all heads of the batch. "asked for" is what
they load and store, of which L2 serves a part; "once" is each byte once for every kernel, which is
what is left of it behind an L2 that holds what CTAs share. What is added to in memory, dQ's sums of
4 bytes an element, is read and written in "once", and written alone in the table above. A run whose
counts are not those of the model, to the byte, ends without a page.
"""
GROUNDS = """\
So at these lengths the recomputed bytes of the model's table are counted; at others they are the
model's alone. The stored ones are the model's at every length: five passes that read a matrix of
all pairs and two that write one, by products that are no kernels of this package."""


@dataclass(frozen=True)
class Measurement:
    """One way at one length; `seconds` the median of `runs` calls, `errors` those of dQ, dK and dV,
    relative RMS; `dram_bytes` None where ncu did not count."""

    seqlen: int
    way: str
    device: str
    runs: int
    seconds: float
    peak_bytes: int
    moved_bytes: int
    flops: int
    errors: tuple[float, ...]
    dram_bytes: int | None = None

    @property
    def right(self) -> bool:
        return max(self.errors) <= RMS_ALLOWED

    @property
    def floor(self) -> float:
        """Seconds that an H100 needs at least, by the model."""
        return max(self.moved_bytes / BANDWIDTH, self.flops / PEAK)


@dataclass(frozen=True)
class Circumstances:
    """When, where and beside what else; and how many calls there were to be at least."""

    where: str
    repeat: int

    @classmethod
    def now(cls, device: str, repeat: int) -> Circumstances:
        """To be asked before the work begins."""
        name = torch.cuda.get_device_name() if device == "cuda" else _processor()
        how = (
            f"CUDA events around single calls, {FLUSH_BYTES >> 20} MiB overwritten before each"
            if device == "cuda"
            else "the clock around single calls, caches as the call before left them"
        )
        threads = torch.get_num_threads()
        return cls(
            f"{date.today()}, {name}, {os.cpu_count()} cores, torch {torch.__version__} with"
            f" {threads} thread{'s' if threads > 1 else ''}, load {os.getloadavg()[0]:.1f} before;"
            f" {how}",
            repeat,
        )


Value = Callable[[Measurement], float]


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


def measured(found: Sequence[Measurement], circumstances: Circumstances) -> Iterator[str]:
    """What this machine said: a row for each length."""
    repeat = circumstances.repeat
    fewer = [f"{one.way} at {one.seqlen:,} of {one.runs}" for one in found if one.runs < repeat]
    but = f" (but {', '.join(fewer)})" if fewer else ""
    yield f"{circumstances.where}; medians of {repeat} calls or more{but}.\n"
    columns = (
        Column("seconds", "latency", lambda one: one.seconds, ".3g"),
        Column("peak MB", "peak memory", lambda one: one.peak_bytes / 1e6, ",.1f"),
    )
    yield from table(found, columns)
    worst = max(max(one.errors) for one in found)
    yield (
        f"\nGradients of both ways at every length are within {100 * worst:.2g} % (RMS) of fp64,"
        f" over one head; {100 * RMS_ALLOWED:.0f} % ends the run."
    )
    yield from _nsight(found)


def _nsight(found: Sequence[Measurement]) -> Iterator[str]:
    """DRAM's bytes where they were counted."""
    if any(one.dram_bytes is None for one in found):
        return
    yield "\n### Bytes of DRAM, by Nsight Compute\n"
    yield "All kernels of a backward, their caches as the kernel before left them.\n"
    columns = (
        Column("counted MB", "traffic as counted", lambda one: (one.dram_bytes or 0) / 1e6, ",.1f"),
        Column("model MB", "traffic as modelled", lambda one: one.moved_bytes / 1e6, ",.1f"),
    )
    yield from table(found, columns)


def modelled(found: Sequence[Measurement], least: int) -> Iterator[str]:
    """What follows from sizes alone; from length `least` on recomputing moves less."""
    columns = (
        Column("moved MB", "traffic", lambda one: one.moved_bytes / 1e6, ",.1f"),
        Column("GFLOP", "arithmetic", lambda one: one.flops / 1e9, ",.1f"),
        Column("floor, µs", "floor", lambda one: one.floor * 1e6, ",.1f"),
    )
    yield from table(found, columns)
    yield f"\nOf all lengths in steps of 8, it has the lower traffic from {least:,} on."


def emulated(counts: Sequence[Counted]) -> Iterator[str]:
    """Counted beside modelled, and what of the model's table stands on it."""
    yield "| length | asked for, MB counted | model | once, MB counted | model |"
    yield "| ---: | ---: | ---: | ---: | ---: |"
    for one in counts:
        sizes = (one.asked, one.asked_model, one.once, one.once_model)
        yield f"| {one.seqlen:,} | {' | '.join(f'{size / 1e6:,.3f}' for size in sizes)} |"
    yield f"\n{GROUNDS}"


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
            ratio = f"{first / second:.2f}" if second else "-"
            cells += [f"{first:{column.form}}", f"{second:{column.form}}", ratio]
        yield f"| {' | '.join(cells)} |"
    yield ""
    lengths = sorted({one.seqlen for one in found})
    for column in columns:
        length = crossover(found, column.value)
        yield f"- Recomputing has the lower {column.what} {_where(length, lengths)}."


def _where(length: int | None, lengths: Sequence[int]) -> str:
    if length is None:
        return "at no length of these"
    if length == lengths[0]:
        return f"at every length of these, so the crossover is below {length:,}"
    before = lengths[lengths.index(length) - 1]
    return f"from {length:,} on: the crossover is between {before:,} and that"


def page(
    found: Sequence[Measurement],
    circumstances: Circumstances,
    least: int,
    counts: Sequence[Counted],
) -> str:
    """The whole page."""
    return "\n".join(
        (
            INTRO,
            "## Measured\n",
            *measured(found, circumstances),
            f"\n![Seconds and peak memory by length]({PLOT})\n",
            models(found, least, counts),
        )
    )


def models(found: Sequence[Measurement], least: int, counts: Sequence[Counted]) -> str:
    """The part of the page that no clock decides."""
    return "\n".join((MODEL, *modelled(found, least), "", EMULATED, *emulated(counts), ""))


def plot(found: Sequence[Measurement]) -> str:
    """Seconds, peak memory and the ratio of seconds, as one SVG that needs no page's colours."""
    lengths = sorted({one.seqlen for one in found})
    by_way = {way: [one for one in found if one.way == way] for way in WAYS}
    panels = [
        (unit, {way: [(one.seqlen, value(one)) for one in by_way[way]] for way in WAYS})
        for unit, value in (
            ("seconds of a backward, by length", lambda one: one.seconds),
            ("peak memory in MB, by length", lambda one: one.peak_bytes / 1e6),
        )
    ]
    ratios = [(a.seqlen, a.seconds / b.seconds) for a, b in zip(*by_way.values(), strict=True)]
    panels.append(("seconds stored over seconds recomputed, by length", {_RATIO: ratios}))
    parts = [_STYLE.format(width=WIDTH, height=len(panels) * HEIGHT + _LEGEND)]
    names = (*WAYS, _RATIO)
    for number, name in enumerate(names):
        at = f'x="{60 + 130 * number}" y="18" class="s{number}"'
        parts.append(f'<text {at} style="fill: currentColor">● {name}</text>')
    for number, (unit, lines) in enumerate(panels):
        series = {
            name: (names.index(name), [_point(lengths, *one) for one in points])
            for name, points in lines.items()
        }
        chart = line_chart([f"{length:,}" for length in lengths], series, unit)
        place = f'<svg y="{_LEGEND + number * HEIGHT}" height="{HEIGHT}"'
        parts.append(chart.replace("<svg", place, 1))
    return "\n".join([*parts, "</svg>\n"])


def write(
    found: Sequence[Measurement],
    circumstances: Circumstances,
    least: int,
    counts: Sequence[Counted],
    folder: Path,
) -> None:
    """Page and plot."""
    (folder / PAGE).write_text(page(found, circumstances, least, counts))
    (folder / PLOT).write_text(plot(found))


def refresh(
    found: Sequence[Measurement], least: int, counts: Sequence[Counted], folder: Path
) -> None:
    """That part anew."""
    path = folder / PAGE
    kept = path.read_text().split(MODEL.splitlines()[0])[0]
    path.write_text(kept + models(found, least, counts))


_LEGEND, _RATIO = 28, "stored over recomputed"
_STYLE = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">
<style>
svg {{ color: #1d2328; font: 12px sans-serif; }} text {{ fill: currentColor; }}
.end {{ text-anchor: end; }} .middle {{ text-anchor: middle; }} .grid {{ stroke: #8b949e55; }}
.s0 {{ color: #d55e00; }} .s1 {{ color: #0072b2; }} .s2 {{ color: #00795a; }}
g polyline {{ fill: none; stroke: currentColor; stroke-width: 2; }}
g line {{ stroke: currentColor; }} g circle {{ fill: currentColor; }}
@media (prefers-color-scheme: dark) {{
  svg {{ color: #e4e7ea; }}
  .s0 {{ color: #ff9d57; }} .s1 {{ color: #62b6ec; }} .s2 {{ color: #4cc9a0; }}
}}
</style>"""


def _point(lengths: list[int], seqlen: int, value: float) -> Point:
    return Point(lengths.index(seqlen), value, value, value)


def _processor() -> str:
    """The CPU's own name, where Linux tells it."""
    told = Path("/proc/cpuinfo")
    names = [line for line in told.read_text().splitlines() if line.startswith("model name")]
    return names[0].split(":", 1)[1].strip() if names else platform.machine()
