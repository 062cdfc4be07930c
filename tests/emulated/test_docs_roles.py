"""docs/roles.md and its timelines are what the kernels do, as they are now."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from hopperflash.plan.budget import shared_memory
from profiling import roles_page
from profiling.roles_page import Seen
from profiling.timeline import Bar

DOCS = Path(__file__).parents[2] / "docs"
DIRECTIONS = ("forward", "backward")

pytestmark = [pytest.mark.emulated, pytest.mark.xdist_group("bf16-128")]


@pytest.fixture(scope="module")
def seen() -> dict[str, Seen]:
    return {direction: roles_page.see(direction) for direction in DIRECTIONS}


def test_the_page_and_its_pictures_are_current(seen: dict[str, Seen]) -> None:
    """If not: `make docs`."""
    for name, text in roles_page.files(list(seen.values())).items():
        assert (DOCS / name).read_text() == text, f"docs/{name} is stale: make docs"


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_rings_fill_the_plan_s_memory(seen: dict[str, Seen], direction: str) -> None:
    """All operands that come by TMA, with as many stages as there is memory for."""
    found = seen[direction]
    sizes = {r.name.split("/")[0]: r.size for r in shared_memory(found.config, 2).regions}
    assert {"Q", "K", "V"} <= {name for ring in found.rings for name in ring.regions}
    for ring in found.rings:
        assert ring.stages * ring.nbytes == sum(sizes[name] for name in ring.regions)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_units_do_one_thing_at_a_time(seen: dict[str, Seen], direction: str) -> None:
    """The tensor cores of both warpgroups, L2 for all copies; all that the model has is drawn."""
    found = seen[direction]
    products = [bar for bar in found.bars if bar.kind == "product"]
    for unit in (products, [bar for bar in found.bars if bar.kind in ("load", "store", "add")]):
        unit.sort(key=lambda bar: bar.start)
        assert all(b.start >= a.end - 1e-6 for a, b in pairwise(unit))
    clocks = sum(bar.end - bar.start for bar in products)
    assert clocks == pytest.approx(roles_page.STEPS * found.step.units.tensor)


def test_forward_softmax_overlaps_products(seen: dict[str, Seen]) -> None:
    """Two GEMMs in flight: behind the softmax of a block runs the P V of the one before."""

    def overlap(a: Bar, b: Bar) -> bool:
        return a.start < b.end and b.start < a.end

    for warpgroup in ("warpgroup 1", "warpgroup 2"):
        bars = [bar for bar in seen["forward"].bars if bar.row.startswith(warpgroup)]
        softmax = [bar for bar in bars if bar.kind == "exponentials"]
        values = [bar for bar in bars if bar.label.startswith("O")]
        assert any(overlap(one, other) for one in softmax for other in values)
