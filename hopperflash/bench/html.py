"""A benchmark as one HTML file that needs nothing else: a plot for each head dim and mask, and all
rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from hopperflash.bench.plot import Point, line_chart
from hopperflash.bench.run import Benchmark, Row

_PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>hopperflash bench: {{ found.machine.name }}</title>
<style>
:root { color-scheme: light dark; --ink: light-dark(#1d2328, #e4e7ea);
  --faint: light-dark(#d9dee3, #3a4249); --paper: light-dark(#ffffff, #15191d);
  --bad: light-dark(#b3261e, #ff8a80); }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 76rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
h3 { font-size: .95rem; font-weight: 600; margin: 0 0 .25rem; }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(22rem, 1fr)); gap: 1.5rem; }
svg { width: 100%; height: auto; }
svg text { font-size: 12px; fill: currentColor; }
.end { text-anchor: end; } .middle { text-anchor: middle; }
.grid { stroke: var(--faint); }
{% for light, dark in colours -%}
.s{{ loop.index0 }} { color: light-dark({{ light }}, {{ dark }}); }
{% endfor -%}
svg g polyline { fill: none; stroke: currentColor; stroke-width: 2; }
svg g line { stroke: currentColor; } svg g circle { fill: currentColor; }
.legend { display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; padding: 0; list-style: none; }
.legend span { font-size: 1.2em; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; white-space: nowrap; }
th, td { padding: .2rem .7rem; text-align: right; border-bottom: 1px solid var(--faint); }
th:first-child, td:first-child, td.why { text-align: left; } td.why { white-space: normal; }
.bad { color: var(--bad); font-weight: 600; }
</style>
</head>
<body>
<h1>hopperflash bench: {{ found.machine.name }}</h1>
{% if found.failures -%}
<p class="bad">{{ found.failures | length }} of hopperflash's rows are wrong or failed.</p>
{% endif -%}
<ul>
{% for fact in facts -%}
<li>{{ fact }}</li>
{% endfor -%}
</ul>
<ul class="legend">
{% for name in names -%}
<li class="s{{ loop.index0 % colours | length }}"><span>●</span> {{ name }}</li>
{% endfor -%}
</ul>
{% for title, panels in sections -%}
<h2>{{ title }}</h2>
<div class="plots">
{% for panel in panels -%}
<figure style="margin:0"><h3>{{ panel.title }}</h3>
{{ panel.svg }}
</figure>
{% endfor -%}
</div>
{% endfor -%}
<h2>All rows</h2>
<div class="scroll">
<table>
<thead><tr><th>implementation</th><th>direction</th><th>mask</th><th>head dim</th><th>heads</th>
<th>batch</th><th>seqlen</th><th>cache</th><th>ms, median</th><th>10 %</th><th>90 %</th>
<th>calls</th><th>{{ unit }}</th><th>SM MHz</th><th></th></tr></thead>
<tbody>
{% for row in found.rows -%}
<tr><td>{{ row.implementation }}</td><td>{{ row.direction }}</td><td>{{ row.shape.mask }}</td>
<td>{{ row.shape.head_dim }}</td><td>{{ row.shape.heads }}/{{ row.shape.kv_heads }}</td>
<td>{{ row.shape.batch }}</td><td>{{ row.shape.seqlen }}</td><td>{{ row.cache }}</td>
{% if row.seconds -%}
<td>{{ ms(row.seconds.median) }}</td><td>{{ ms(row.seconds.low) }}</td>
<td>{{ ms(row.seconds.high) }}</td><td>{{ row.seconds.samples }}</td>
<td>{{ "%.4g" | format(row.flops_per_second / scale) }}</td>
<td>{% if row.clocks %}{{ row.clocks.sm_mhz | join("-") }}{% endif %}</td><td></td>
{% else -%}
<td class="why{{ "" if row.status == "refused" else " bad" }}" colspan="7">{{ row.status }}:
{{ row.why }}</td>
{% endif -%}
</tr>
{% endfor -%}
</tbody>
</table>
</div>
</body>
</html>
"""

# Of light and dark pages, told apart also by those who see few colours (after Okabe and Ito).
_COLOURS = (
    ("#d55e00", "#ff9d57"),
    ("#0072b2", "#62b6ec"),
    ("#009e73", "#4fd6ad"),
    ("#a6478a", "#e79bcb"),
    ("#7a7a7a", "#b0b0b0"),
    ("#b08900", "#f0d04f"),
    ("#3b3fb6", "#a3a6ff"),
)


@dataclass(frozen=True)
class Panel:
    """One plot: speed by length."""

    title: str
    svg: Markup


def page(found: Benchmark, facts: list[str]) -> str:
    """The whole file; `facts` are the lines that say where and how it was measured."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    unit, scale = found.unit
    names = list(dict.fromkeys(row.implementation for row in found.rows))
    text: str = environment.from_string(_PAGE).render(
        found=found,
        facts=facts,
        names=names,
        colours=_COLOURS,
        sections=list(_sections(found, names)),
        unit=unit,
        scale=scale,
        ms=lambda seconds: f"{1e3 * seconds:.4g}",
    )
    return text


def _sections(found: Benchmark, names: list[str]) -> Iterator[tuple[str, list[Panel]]]:
    """A section for each direction and state of the cache, a plot for each head dim and mask."""
    sections: dict[str, dict[str, list[Row]]] = {}
    for row in found.rows:
        section = sections.setdefault(f"{row.direction}, {row.cache} cache", {})
        title = f"head dim {row.shape.head_dim}, {row.shape.mask}"
        section.setdefault(title, []).append(row)
    for title, plots in sections.items():
        yield title, [Panel(name, _plot(rows, names, found.unit)) for name, rows in plots.items()]


def _plot(rows: list[Row], names: list[str], told_in: tuple[str, float]) -> Markup:
    unit, scale = told_in
    places = sorted({row.shape.seqlen for row in rows})
    series: dict[str, tuple[int, list[Point]]] = {}
    for row in sorted(rows, key=lambda row: row.shape.seqlen):
        if row.seconds is None:
            continue
        slow, typical, fast = (
            row.flops / seconds / scale
            for seconds in (row.seconds.high, row.seconds.median, row.seconds.low)
        )
        _, points = series.setdefault(row.implementation, (names.index(row.implementation), []))
        points.append(Point(places.index(row.shape.seqlen), slow, typical, fast))
    labels = [f"{place // 1024}k" if place % 1024 == 0 else str(place) for place in places]
    return Markup(line_chart(labels, series, f"{unit} by sequence length"))
