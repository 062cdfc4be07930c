"""When each role of a CTA does what: a trace of its warps, with the clocks of the plan's model.

Every warp does its events in its own order and waits as the kernel does. A product takes the tensor
cores, a copy takes L2, and threads take their sub-core for as long as `hopperflash.plan.cost` says;
each of these does one thing after the other. Nothing has a latency.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import takewhile

from hopperflash.plan.budget import SharedMemoryBudget
from hopperflash.plan.cost import Gemm, TileStep
from hopperflash.plan.units import HOPPER, SUB_CORES
from profiling.kernel_trace import (
    WARPS_PER_WARPGROUP,
    Add,
    Arrive,
    Await,
    AwaitStores,
    Event,
    Load,
    Meet,
    Multiply,
    Store,
    Trace,
    Wait,
    Work,
)


@dataclass(frozen=True)
class Ring:
    """Stages of shared memory that a warp fills and others release.

    `nbytes` come into a stage, as many from each of `ctas`; `arrivals` release it, if it is
    `reused`.
    """

    regions: tuple[str, ...]
    stages: int
    nbytes: int
    ctas: int
    producer: int
    consumers: tuple[int, ...]
    arrivals: int
    reused: bool


@dataclass(frozen=True)
class Bar:
    """Something that a unit does for a role, in clocks from the start."""

    row: str
    kind: str
    label: str
    start: float
    end: float


@dataclass(frozen=True)
class Product:
    """Neighbouring wgmmas of a warpgroup: one GEMM."""

    gemm: Gemm
    clocks: float
    group: int


Action = Event | Product


class Operands:
    """Names of what lies in shared memory, from the plan's budget."""

    def __init__(self, budget: SharedMemoryBudget, step: TileStep) -> None:
        self._regions: list[tuple[int, int, str]] = []
        self._gemms = step.gemms
        end = 0
        for region in budget.regions:
            end = -(-end // region.alignment) * region.alignment
            self._regions.append((end, end + region.size, region.name))
            end += region.size

    def region(self, address: int, *, leaving: bool = False) -> str:
        """The operand at an address: of Q/O, which share memory, Q, or O where it is `leaving`."""
        for start, end, name in self._regions:
            if start <= address < end:
                return name.split("/")[-1 if leaving else 0]
        raise ValueError(f"nothing of the plan lies at shared memory {address}")

    def gemm(self, event: Multiply) -> Gemm:
        """The plan's GEMM with these operands, such as K and Q in "S^T = K Q^T"."""
        b = self.region(event.b)
        for gemm in self._gemms:
            first, second = (x.removesuffix("^T") for x in re.split(r"\+?= ", gemm.name)[1].split())
            a = first if event.a is None else self.region(event.a)
            if (a, b) == (first, second) and (event.a is None) == gemm.a_in_registers:
                return gemm
        raise ValueError(f"no GEMM of the plan multiplies by {b} as {event} does")


def rings(trace: Trace, operands: Operands) -> list[Ring]:
    """The rings of mbarriers, in the order of their first use."""
    filled, arrivals = _filled(trace), _arrivals(trace)
    found: dict[tuple[str, ...], list[tuple[int, int, list[Load]]]] = defaultdict(list)
    for warp, events in sorted(trace.events.items()):
        fills = [event for event in events if isinstance(event, (Wait, Arrive, Load))]
        for at, event in enumerate(fills):
            if isinstance(event, Wait) and event.barrier not in filled:
                behind = takewhile(lambda one: not isinstance(one, Wait), fills[at + 1 :])
                loads = [one for one in behind if isinstance(one, Load)]
                names = tuple(dict.fromkeys(operands.region(load.address) for load in loads))
                found[names].append((warp, event.barrier, loads))
    made = []
    for names, uses in found.items():
        producer, _, loads = uses[0]
        stages = {barrier for _, barrier, _ in uses}
        released = [arrivals[barrier] for barrier in stages if barrier in arrivals]
        made.append(
            Ring(
                regions=names,
                stages=len(stages),
                nbytes=sum(load.nbytes * load.ctas for load in loads),
                ctas=loads[0].ctas,
                producer=producer,
                consumers=tuple(sorted({warp for warps, _ in released for warp in warps})),
                arrivals=max((count for _, count in released), default=0),
                reused=len(uses) > len(stages),
            )
        )
    return made


def _filled(trace: Trace) -> set[int]:
    """mbarriers that count loads."""
    events = (event for own in trace.events.values() for event in own)
    return {event.barrier for event in events if isinstance(event, Load)}


def _arrivals(trace: Trace) -> dict[int, tuple[set[int], int]]:
    """Who arrives at each mbarrier that counts no loads, and how many arrivals complete it."""
    filled = _filled(trace)
    found: dict[int, tuple[set[int], int]] = {}
    for warp, events in trace.events.items():
        for event in events:
            if isinstance(event, Arrive) and event.barrier not in filled:
                found.setdefault(event.barrier, (set(), event.count))[0].add(warp)
    return found


@dataclass
class _Warp:
    """A warp on its way through its actions."""

    number: int
    actions: list[Action]
    clocks_per_instruction: float
    at: int = 0
    clock: float = 0.0
    times: dict[tuple[str, int], int] = field(default_factory=lambda: defaultdict(int))
    stored: float = 0.0

    @property
    def action(self) -> Action | None:
        return self.actions[self.at] if self.at < len(self.actions) else None

    @property
    def warpgroup(self) -> int:
        return self.number // WARPS_PER_WARPGROUP

    def done(self, clock: float) -> bool:
        """On to the next action at `clock`."""
        self.clock = max(self.clock, clock)
        self.at += 1
        return True


class Replay:
    """Lays a trace out in time; `bars` are what came of it."""

    def __init__(self, trace: Trace, operands: Operands, step: TileStep) -> None:
        self._operands = operands
        self._arrivals, filled = _arrivals(trace), _filled(trace)
        self._warps = [
            _Warp(warp, actions, _pace(actions, step))
            for warp, events in sorted(trace.events.items())
            for actions in [list(_actions(events, operands))]
        ]
        # The loads of each phase of an mbarrier, and when they and the arrivals have come.
        self._expected: dict[tuple[int, int], int] = defaultdict(int)
        for events in trace.events.values():
            phase: dict[int, int] = defaultdict(int)
            for event in events:
                if isinstance(event, Arrive):
                    phase[event.barrier] += 1
                elif isinstance(event, Load):
                    self._expected[event.barrier, phase[event.barrier]] += 1
        self._filled = filled
        self._landed: dict[tuple[int, int], list[float]] = defaultdict(list)
        self._arrived: dict[tuple[int, int], list[float]] = defaultdict(list)
        self._met: dict[tuple[int, int], dict[int, float]] = defaultdict(dict)
        self._products: dict[tuple[int, int], float] = defaultdict(float)
        self._busy: dict[str, float] = defaultdict(float)
        self.bars: list[Bar] = []

    def run(self) -> list[Bar]:
        """All bars. The warp that is furthest behind goes first, so that units serve in order."""
        while any(warp.action is not None for warp in self._warps):
            for warp in sorted(self._warps, key=lambda warp: (warp.clock, warp.number)):
                if warp.action is not None and self._advance(warp, warp.action):
                    break
            else:
                stuck = [(warp.number, warp.action) for warp in self._warps if warp.action]
                raise ValueError(f"the trace cannot go on: {stuck}")
        return self.bars

    def _advance(self, warp: _Warp, action: Action) -> bool:
        """Whether the warp could do its next action."""
        if isinstance(action, Work):
            return warp.done(self._work(warp, action))
        if isinstance(action, Load):
            phase = warp.times["arrive", action.barrier]
            end = self._use_l2(warp, action.nbytes, "load", self._operands.region(action.address))
            self._landed[action.barrier, phase].append(end)
            return warp.done(0)
        if isinstance(action, Store):
            kind = "add" if action.adds else "store"
            name = self._operands.region(action.address, leaving=True)
            warp.stored = self._use_l2(warp, action.nbytes, kind, name)
            return warp.done(0)
        if isinstance(action, Add):
            self._use_l2(warp, action.nbytes, "add", "dQ")
            return warp.done(0)
        if isinstance(action, AwaitStores):
            return warp.done(warp.stored)
        if isinstance(action, Arrive):
            warp.times["arrive", action.barrier] += 1
            phase = warp.times["arrive", action.barrier]
            self._arrived[action.barrier, phase].append(warp.clock)
            return warp.done(0)
        if isinstance(action, Product):
            return self._multiply(warp, action)
        if isinstance(action, Await):
            ends = (self._products[warp.warpgroup, n] for n in range(1, action.group + 1))
            return warp.done(max(ends, default=0.0))
        return self._wait(warp, action)

    def _wait(self, warp: _Warp, action: Action) -> bool:
        if isinstance(action, Meet):
            key = ("meet", action.barrier)
            there = self._met[action.barrier, warp.times[key]]
            there[warp.number] = warp.clock
            if action.waits and len(there) < action.warps:
                return False
            warp.times[key] += 1
            return warp.done(max(there.values()) if action.waits else 0)
        assert isinstance(action, Wait)
        full = action.barrier in self._filled
        phase = warp.times["wait", action.barrier] + full
        if full:
            times, needed = self._landed, self._expected[action.barrier, phase]
        else:
            times, needed = self._arrived, len(self._arrivals.get(action.barrier, (set(), 0))[0])
        found = times[action.barrier, phase]
        if phase and len(found) < needed:
            return False
        warp.times["wait", action.barrier] += 1
        return warp.done(max(found, default=0.0))

    def _work(self, warp: _Warp, action: Work) -> float:
        unit = f"sub-core {warp.number % SUB_CORES}"
        start = max(warp.clock, self._busy[unit])
        end = self._busy[unit] = start + action.instructions * warp.clocks_per_instruction
        if warp.number % WARPS_PER_WARPGROUP == 0 and warp.clocks_per_instruction:
            kind = "exponentials" if action.mufu else "threads"
            self._bar(f"warpgroup {warp.warpgroup}: threads", kind, "", start, end)
        return end

    def _use_l2(self, warp: _Warp, nbytes: int, kind: str, label: str) -> float:
        start = max(warp.clock, self._busy["L2"])
        end = self._busy["L2"] = start + nbytes / HOPPER.l2_bytes
        consumer = warp.clocks_per_instruction > 0
        row = f"warpgroup {warp.warpgroup}: {kind}s" if consumer else f"warp {warp.number}: TMA"
        self._bar(row, kind, label, start, end)
        return end

    def _multiply(self, warp: _Warp, product: Product) -> bool:
        """When all four warps of the warpgroup are there."""
        group = [other for other in self._warps if other.warpgroup == warp.warpgroup]
        if not all(isinstance(other.action, Product) for other in group):
            return False
        issued = max(other.clock for other in group)
        start = max(issued, self._busy["tensor"])
        end = self._busy["tensor"] = start + product.clocks
        key = (warp.warpgroup, product.group)
        self._products[key] = max(self._products[key], end)
        row = f"warpgroup {warp.warpgroup}: tensor cores"
        self._bar(row, "product", product.gemm.name, start, end)
        for other in group:
            other.done(issued)
        return True

    def _bar(self, row: str, kind: str, label: str, start: float, end: float) -> None:
        """Bars of a kind that touch, as a unit's, are one."""
        for at in range(len(self.bars) - 1, max(-1, len(self.bars) - 9), -1):
            last = self.bars[at]
            if (last.row, last.kind, last.label) == (row, kind, label) and last.end == start:
                self.bars[at] = Bar(row, kind, label, last.start, end)
                return
        self.bars.append(Bar(row, kind, label, start, end))


def _actions(events: list[Event], operands: Operands) -> Iterator[Action]:
    """Neighbouring wgmmas of a GEMM become one product."""
    pending: Product | None = None
    for event in events:
        if isinstance(event, Multiply):
            gemm, clocks = operands.gemm(event), event.columns / 2
            if pending is not None and (pending.gemm, pending.group) == (gemm, event.group):
                pending = Product(gemm, pending.clocks + clocks, event.group)
                continue
            if pending is not None:
                yield pending
            pending = Product(gemm, clocks, event.group)
            continue
        if pending is not None:
            yield pending
            pending = None
        yield event
    if pending is not None:
        yield pending


def _pace(actions: list[Action], step: TileStep) -> float:
    """Clocks of an instruction of a warp that multiplies, such that its steps take what the plan
    says; others take none.

    PTX has more instructions than the machine's code, in about the same places.
    """
    products = [at for at, action in enumerate(actions) if isinstance(action, Product)]
    if not products:
        return 0.0
    gemms = [action.gemm for action in actions if isinstance(action, Product)]
    steps = gemms.count(gemms[0])
    inside = actions[products[0] : products[-1]]
    instructions = sum(action.instructions for action in inside if isinstance(action, Work))
    units = step.units
    clocks = max(units.mufu, units.issue, units.fma, units.alu) / step.warpgroups
    return clocks * steps / instructions
