"""How busy the SMs of an H100 are under each scheduler and order of tiles, by a simulation.

    python -m profiling.schedules

prints the table of `docs/scheduling.md`: the share of the time in which SMs multiply, for the
forward at head dim 128 with 16 heads and 16384 tokens, the shape for which peers report speeds.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import product

from hopperflash.plan import arch_of, make_plan
from hopperflash.plan.config import ForwardConfig, Scheduler
from hopperflash.plan.cost import tile_step
from hopperflash.plan.scheduling import ALONE_CLOCKS, BEHIND_ANOTHER_CLOCKS, ZEROING_CLOCKS
from hopperflash.problem import AttnOptions, AttnProblem, OperandFacts, build_problem

TOKENS, HEADS, HEAD_DIM = 16384, 16, 128
SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)
SMS = arch_of("sm_90a").sms
ORDERS = (
    ("single, head by head", Scheduler.SINGLE, False),
    ("single, heads in turns", Scheduler.SINGLE, True),
    ("persistent, heads in turns", Scheduler.PERSISTENT, True),
    ("dynamic, heads in turns", Scheduler.DYNAMIC, True),
)


def makespan(tiles: list[float], scheduler: Scheduler) -> float:
    """Clocks until the last of `tiles`, given by what each multiplies, in the order of the launch.

    An SM that is free takes the next tile, but of a persistent kernel every `SMS`th.
    """
    first, other = ALONE_CLOCKS, BEHIND_ANOTHER_CLOCKS
    if scheduler is Scheduler.PERSISTENT:
        shares = (tiles[sm::SMS] for sm in range(SMS))
        return max(first - other + sum(share) + other * len(share) for share in shares)
    each, start = (first, 0.0) if scheduler is Scheduler.SINGLE else (other, first - other)
    free = [start] * SMS
    for clocks in tiles:
        heapq.heappush(free, heapq.heappop(free) + clocks + each)
    return max(free) + (ZEROING_CLOCKS if scheduler is Scheduler.DYNAMIC else 0)


def tiles_of(problem: AttnProblem, config: ForwardConfig, swizzle: int) -> list[float]:
    """Clocks of all tiles in the order of the launch."""
    step = tile_step(config, problem.dtype.itemsize).units.bound.clocks
    blocks = -(-problem.seqlen_q // config.tile_m)
    order = range(blocks)
    steps = [-(-problem.seqlen_k // config.tile_n)] * blocks
    if problem.is_causal:
        order = order[::-1]
        steps = [-(-(block + 1) * config.tile_m // config.tile_n) for block in range(blocks)]
    sections = range(problem.batch * problem.heads_q // swizzle)
    return [step * steps[block] for _, block, _ in product(sections, order, range(swizzle))]


def problem_of(seqlen: int, causal: bool) -> AttnProblem:
    """The forward of one row of the table."""
    shape = (TOKENS // seqlen, seqlen, HEADS, HEAD_DIM)
    strides = (seqlen * HEADS * HEAD_DIM, HEADS * HEAD_DIM, HEAD_DIM, 1)
    facts = OperandFacts(shape, strides, 16, "bfloat16", "cpu")
    return build_problem(facts, facts, facts, AttnOptions(causal=causal))


def busy(seqlen: int, causal: bool) -> tuple[list[float], Scheduler]:
    """The shares of `ORDERS`, and the scheduler that the plan chooses."""
    problem = problem_of(seqlen, causal)
    plan = make_plan(problem, arch_of("sm_90a"))
    config = plan.calls[-1].spec.config
    assert isinstance(config, ForwardConfig)
    swizzle = int(dict(plan.steps.scalars)["head_swizzle"])
    shares = []
    for _, scheduler, swizzled in ORDERS:
        tiles = tiles_of(problem, config, swizzle if swizzled else 1)
        shares.append(sum(tiles) / SMS / makespan(tiles, scheduler))
    return shares, config.scheduler


def table() -> Iterator[str]:
    """Markdown, a row for each length and mask."""
    yield f"| mask | length | {' | '.join(name for name, _, _ in ORDERS)} | the plan's |"
    yield "| --- " * (len(ORDERS) + 3) + "|"
    for causal, seqlen in product((True, False), SEQLENS):
        shares, chosen = busy(seqlen, causal)
        mask = "causal" if causal else "full"
        listed = " | ".join(f"{share:.3f}" for share in shares)
        yield f"| {mask} | {seqlen} | {listed} | {chosen.value} |"


if __name__ == "__main__":
    print("\n".join(table()))
