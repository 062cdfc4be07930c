"""The clocks of a replayed trace, by hand."""

from __future__ import annotations

import pytest

from hopperflash.plan.budget import Region, SharedMemoryBudget
from hopperflash.plan.cost import Gemm, ThreadWork, TileStep
from profiling.kernel_trace import Arrive, Await, Event, Load, Meet, Multiply, Trace, Wait, Work
from profiling.timeline import Bar, Operands, Replay, rings

FULL, EMPTY, TILE, BYTES = 0, 8, 1024, 3200
STEP = TileStep(
    scores=64 * 64,
    warpgroups=1,
    gemms=(Gemm("S = Q K^T", 64, 64, 16),),
    shared=(),
    l2_bytes=0,
    thread=ThreadWork(mufu=1),
)
BUDGET = SharedMemoryBudget((Region("barriers", 16, 8), Region("K", BYTES), Region("Q/O", 64)))
QUERIES = 5120  # behind K, at its alignment


def trace(*extra: Event) -> Trace:
    """Two fills of a ring of one stage, and four warps that multiply what comes."""
    made = Trace()
    for _ in range(2):
        for event in (Wait(EMPTY), Arrive(FULL, 1), Load(TILE, BYTES, FULL)):
            made.add(0, event)
    for warp in range(4, 8):
        for number in (1, 2):
            multiply = Multiply(a=QUERIES, b=TILE, columns=64, group=number)
            for one in (Wait(FULL), multiply, Await(number), Work(10, 1), Arrive(EMPTY, 4)):
                made.add(warp, one)
    for event in extra:
        made.add(4, event)
    return made


def bars(of: Trace) -> dict[str, list[Bar]]:
    found: dict[str, list[Bar]] = {}
    for bar in Replay(of, Operands(BUDGET, STEP), STEP).run():
        found.setdefault(bar.kind, []).append(bar)
    return found


def test_a_stage_is_filled_again_when_it_was_released() -> None:
    """32 bytes and 2 columns a clock; the threads take 8 clocks a step, as the plan has it."""
    found = bars(trace())
    first, second = found["load"]
    assert (first.start, first.end) == (0, 100)
    (product, later), (threads, *_) = found["product"], found["exponentials"]
    assert (product.start, product.end) == (100, 132)
    assert threads.start == 132
    assert second.start == pytest.approx(threads.end)
    assert later.start == pytest.approx(second.end)


def test_rings_are_found() -> None:
    (ring,) = rings(trace(), Operands(BUDGET, STEP))
    assert (ring.regions, ring.stages, ring.nbytes, ring.reused) == (("K",), 1, BYTES, True)
    assert (ring.producer, ring.consumers, ring.arrivals) == (0, (4, 5, 6, 7), 4)


def test_memory_that_is_reused_has_two_names() -> None:
    operands = Operands(BUDGET, STEP)
    assert (operands.region(QUERIES), operands.region(QUERIES, leaving=True)) == ("Q", "O")
    with pytest.raises(ValueError, match="nothing of the plan"):
        operands.region(1 << 20)


def test_a_product_that_the_plan_has_not_is_refused() -> None:
    with pytest.raises(ValueError, match="no GEMM of the plan"):
        bars(trace(Multiply(a=None, b=TILE, columns=64, group=3)))


def test_a_trace_that_cannot_go_on_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot go on"):
        bars(trace(Meet(1, 2)))


def test_who_only_arrives_does_not_wait() -> None:
    """The last arrival of warps that take turns may have nobody who waits for it."""
    assert bars(trace(Meet(1, 2, waits=False))) == bars(trace())
