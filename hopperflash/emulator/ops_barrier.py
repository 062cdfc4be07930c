"""bar/barrier over the threads of a CTA, with reductions, and barrier.cluster."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .decode import Effect, Op, RowOf, effect, unknown
from .lane_groups import groups
from .operands import active, lanes_of, reader
from .ptx_ir import Instruction, Negated
from .waiting import BarrierWait, Block, ClusterWait

_BAR = re.compile(
    r"(?:bar|barrier)(?:\.cta)?\.(?:sync|arrive|red\.(?P<op>popc|and|or))(?:\.aligned)?"
    r"(?P<type>\.u32|\.pred)?$"
)
_CLUSTER_MODIFIERS = {"acquire", "release", "relaxed", "aligned"}


@dataclass
class ReductionWait(BarrierWait):
    """bar.red: the waiting lanes get the result when the barrier is full."""

    deliver: Callable[[], None]

    def resume(self) -> None:
        self.deliver()


def decode_bar(ins: Instruction) -> Op:
    if ins.opcode == "bar.warp.sync":
        return _warp_barrier(ins)
    if ins.opcode.startswith("barrier.cluster."):
        return _decode_cluster(ins)
    match = _BAR.match(ins.opcode)
    if match is None or (match["type"] is None) != (match["op"] is None):
        raise unknown(ins)
    if match["op"] is not None:
        return _decode_reduction(ins, match["op"])
    waits = "sync" in ins.parts
    number, *count = ins.operands

    def make(row: RowOf) -> Effect:
        read_number = reader(number, "u", row)
        read_count = reader(count[0], "u", row) if count else (lambda g: np.uint32(0))

        def run(g: Any, m: Any) -> list[Block]:
            blocks = []
            for group in groups(g, m, read_number(g), read_count(g)):
                barrier, generation, point = g.cta.arrive_at_barrier(g, group.lanes, *group.values)
                if waits and barrier.generation == generation:
                    blocks.append(Block(group.lanes, BarrierWait(barrier, generation, point)))
                elif waits:
                    g.cta.order.acquire(g, group.lanes, point)
            if waits:
                g.cta.machine.counters.barrier_waits += g.last_warp - g.first_warp + 1
            return blocks

        return run

    return effect(ins, make, reads=(number, *count), alone=True, collective="warp")


def _warp_barrier(ins: Instruction) -> Op:
    (mask,) = ins.operands
    members = None
    if getattr(mask, "value", -1) & 0xFFFFFFFF != 0xFFFFFFFF or not hasattr(mask, "value"):

        def members(row: RowOf) -> Callable[[Any], Any]:
            return reader(mask, "u", row)

    return effect(
        ins, lambda row: lambda g, m: None, reads=(mask,), collective="warp", members=members,
        ends=members is not None,
    )  # fmt: skip


_RESULT: dict[str, Callable[[int, int], int]] = {
    "popc": lambda true, threads: true,
    "and": lambda true, threads: true == threads,
    "or": lambda true, threads: true > 0,
}


def _decode_reduction(ins: Instruction, operation: str) -> Op:
    dst, number, *count, source = ins.operands
    result, negated = _RESULT[operation], isinstance(source, Negated)
    predicate = source.register if isinstance(source, Negated) else source

    def make(row: RowOf) -> Effect:
        read_number, read = reader(number, "u", row), reader(predicate, "p", row)
        read_count = reader(count[0], "u", row) if count else (lambda g: np.uint32(0))
        view, target = "u" if operation == "popc" else "p", row(dst)

        def run(g: Any, m: Any) -> list[Block]:
            blocks = []
            flags = lanes_of(read(g), g) ^ negated
            for group in groups(g, m, read_number(g), read_count(g)):
                lanes = group.lanes
                barrier, generation, point = g.cta.arrive_at_barrier(g, lanes, *group.values)
                votes = barrier.votes.setdefault(generation, [0, 0])
                votes[0] += int(flags[lanes].sum())
                votes[1] += len(lanes)

                def deliver(lanes: NDArray[Any] = lanes, votes: list[int] = votes) -> None:
                    g.rows[view][target][lanes] = result(*votes)

                if barrier.generation == generation:
                    wait = ReductionWait(barrier, generation, point, deliver)
                    blocks.append(Block(lanes, wait))
                else:
                    barrier.votes.pop(generation)
                    g.cta.order.acquire(g, lanes, point)
                    deliver()
            g.cta.machine.counters.barrier_waits += g.last_warp - g.first_warp + 1
            return blocks

        return run

    reads = (number, *count, predicate, *((dst,) if ins.guard else ()))
    return effect(ins, make, writes=(dst,), reads=reads, alone=True, collective="warp")


def _decode_cluster(ins: Instruction) -> Op:
    action = ins.parts[2]
    if action not in ("arrive", "wait") or not _CLUSTER_MODIFIERS.issuperset(ins.parts[3:]):
        raise unknown(ins)
    relaxed = "relaxed" in ins.parts

    def arrive(g: Any, m: Any) -> list[Block]:
        g.cta.arrive_at_cluster(g, active(m, g), relaxed)
        return []

    def wait(g: Any, m: Any) -> list[Block]:
        waiting = g.cta.cluster_phases(g, active(m, g))
        g.cta.machine.counters.cluster_waits += g.last_warp - g.first_warp + 1
        barrier = g.cta.cluster_barrier
        blocks = []
        for phase, lanes in waiting:
            if barrier.phase == phase:
                blocks.append(Block(lanes, ClusterWait(barrier, phase)))
            else:
                g.cta.order.acquire(g, lanes, barrier.done)
        return blocks

    return effect(
        ins, lambda row: arrive if action == "arrive" else wait, alone=True, collective="warp"
    )
