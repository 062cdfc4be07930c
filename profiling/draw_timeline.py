"""A timeline as SVG that stands by itself, on light and dark pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from hopperflash.plan.cost import TileStep
from profiling.timeline import Bar

WIDTH, LEFT, RIGHT, TOP, ROW, BAR = 1100, 175, 10, 52, 28, 20
_LETTER = 6.5  # width of one in a bar
_LEAST = 0.4  # of a bar that is drawn
# Light and dark, told apart also by those who see few colours (after Okabe and Ito).
_COLOURS = {
    "load": ("#7aa6d6", "#4d7fb5"),
    "exponentials": ("#e8b04a", "#b98420"),
    "threads": ("#d9c9a3", "#85764d"),
    "store": ("#8fbf8f", "#4f8a4f"),
    "add": ("#c79bc7", "#8a5a8a"),
    "product0": ("#e07b54", "#b5532c"),
    "product1": ("#4fb39a", "#2f8570"),
    "product2": ("#d98cb3", "#a65580"),
    "product3": ("#9d94d6", "#6a60a8"),
    "product4": ("#b9b94f", "#7f7f2a"),
}
_KINDS = {
    "load": "loaded by TMA",
    "exponentials": "threads, with exponentials",
    "threads": "threads, other",
    "store": "stored",
    "add": "added to memory",
}


def draw(bars: Sequence[Bar], step: TileStep) -> str:
    """Rows are units of roles, in the order of a step; the axis counts clocks."""
    rows = sorted({bar.row for bar in bars}, key=_place)
    end = max(bar.end for bar in bars)
    products = [gemm.name for gemm in step.gemms]
    height = TOP + ROW * len(rows) + 30
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
            _style(),
            *_legend(bars, products),
            *_axis(end, len(rows)),
            *(line for bar in bars for line in _bar(bar, rows.index(bar.row), end, products)),
            *(
                f'<text x="{LEFT - 8}" y="{TOP + ROW * at + 15}" class="end">{escape(row)}</text>'
                for at, row in enumerate(rows)
            ),
            "</svg>\n",
        )
    )


def _place(row: str) -> tuple[bool, int, int]:
    """Producers first; of a warpgroup what it multiplies, computes, and puts out."""
    role, _, unit = row.partition(": ")
    order = ["TMA", "tensor cores", "threads", "adds", "stores"]
    return role.startswith("warpgroup"), int(role.split()[1]), order.index(unit)


def _x(clock: float, end: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * clock / end


def _bar(bar: Bar, row: int, end: float, products: list[str]) -> Iterator[str]:
    x, width = _x(bar.start, end), _x(bar.end, end) - _x(bar.start, end)
    if width < _LEAST:
        return
    kind = f"product{products.index(bar.label)}" if bar.kind == "product" else bar.kind
    y = TOP + ROW * row
    words = bar.label or _KINDS[bar.kind]
    title = f"{words}: clocks {bar.start:,.0f} to {bar.end:,.0f}"
    yield (
        f'<rect class="{kind}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR}">'
        f"<title>{escape(title)}</title></rect>"
    )
    label = bar.label.split(" ")[0]
    if label and width >= _LETTER * len(label) + 2:
        yield f'<text class="middle in" x="{x + width / 2:.1f}" y="{y + 14}">{escape(label)}</text>'


def _axis(end: float, rows: int) -> Iterator[str]:
    tick = next(step for step in (500, 1000, 2000, 5000, 10_000) if end / step <= 12)
    bottom = TOP + ROW * rows
    for clock in range(0, int(end) + 1, tick):
        x = _x(clock, end)
        yield f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 4}" y2="{bottom}"/>'
        words = f"{clock:,} clocks" if clock == 0 else f"{clock:,}"
        yield f'<text class="middle" x="{x:.1f}" y="{bottom + 16}">{words}</text>'


def _legend(bars: Sequence[Bar], products: list[str]) -> Iterator[str]:
    kinds = {bar.kind for bar in bars}
    entries = [(f"product{at}", name) for at, name in enumerate(products)]
    entries += [(kind, words) for kind, words in _KINDS.items() if kind in kinds]
    x, y = 8.0, 6
    for kind, words in entries:
        width = 34 + _LETTER * len(words)
        if x + width > WIDTH:
            x, y = 8.0, y + 18
        yield f'<rect class="{kind}" x="{x:.1f}" y="{y}" width="12" height="12"/>'
        yield f'<text x="{x + 16:.1f}" y="{y + 10}">{escape(words)}</text>'
        x += width


def _style() -> str:
    light = " ".join(f".{kind} {{ fill: {one}; }}" for kind, (one, _) in _COLOURS.items())
    dark = " ".join(f".{kind} {{ fill: {other}; }}" for kind, (_, other) in _COLOURS.items())
    return f"""<style>
text {{ font: 11px sans-serif; fill: #1d2328; }} .end {{ text-anchor: end; }}
.middle {{ text-anchor: middle; }} .grid {{ stroke: #8b949e55; }}
{light}
@media (prefers-color-scheme: dark) {{
text {{ fill: #e4e7ea; }}
{dark}
}}
</style>"""
