"""A line chart as SVG text that stands in an HTML page by itself; colours are the page's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 560, 300
LEFT, RIGHT, TOP, BOTTOM = 48, 12, 12, 44
MARKERS = 7  # classes s0 to s6 of the page


@dataclass(frozen=True)
class Point:
    """A value at one place of the axis, and how far it spreads."""

    place: int
    low: float
    value: float
    high: float


def line_chart(
    places: Sequence[str], series: Mapping[str, tuple[int, Sequence[Point]]], unit: str
) -> str:
    """Points joined by lines, evenly spaced; `series` gives each name its colour and points."""
    top = max((p.high for _, points in series.values() for p in points), default=1.0)
    step = _round_step(top / 5)
    ticks = [step * i for i in range(int(top / step) + 2)]
    inner_width, inner_height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def x(place: int) -> float:
        return LEFT + inner_width * (place + 0.5) / len(places)

    def y(value: float) -> float:
        return TOP + inner_height * (1 - value / ticks[-1])

    def parts() -> Iterator[str]:
        yield f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(unit)}">'
        for tick in ticks:
            yield f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}"{_level(y(tick))}/>'
            yield f'<text class="end" x="{LEFT - 6}" y="{y(tick) + 4:.1f}">{tick:g}</text>'
        for place, text in enumerate(places):
            at = f'x="{x(place):.1f}" y="{HEIGHT - BOTTOM + 18}"'
            yield f'<text class="middle" {at}>{escape(text)}</text>'
        for name, (colour, points) in series.items():
            yield f'<g class="s{colour % MARKERS}"><title>{escape(name)}</title>'
            path = " ".join(f"{x(p.place):.1f},{y(p.value):.1f}" for p in points)
            yield f'<polyline points="{path}"/>'
            for p in points:
                at = f'{x(p.place):.1f}" y1="{y(p.low):.1f}" y2="{y(p.high):.1f}"'
                yield f'<line x1="{x(p.place):.1f}" x2="{at}/>'
                yield f'<circle cx="{x(p.place):.1f}" cy="{y(p.value):.1f}" r="3"/>'
            yield "</g>"
        yield f'<text x="{LEFT}" y="{HEIGHT - 6}">{escape(unit)}</text></svg>'

    return "\n".join(parts())


def _level(height: float) -> str:
    return f' y1="{height:.1f}" y2="{height:.1f}"'


def _round_step(least: float) -> float:
    """The next of 1, 2, 5, 10, 20, ... with powers of ten below too."""
    power = 1.0
    while power > least:
        power /= 10
    while power * 10 <= least:
        power *= 10
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least)
