"""Synchronisation opcodes: mbarrier, bar/barrier, cluster barrier, fences, register counts."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .decode import Effect, Op, RowOf, effect, unknown
from .errors import EmulationError
from .operands import active, address_reader, lanes_of, one_lane_per_warp, reader, scalar_at, writer
from .ptx_ir import Immediate, Instruction, Register, Sink
from .waiting import BarrierWait, Block, ClusterWait, MBarrierWait

_MODIFIERS = {
    "relaxed", "acquire", "release", "cta", "cluster", "shared", "shared::cta",
    "shared::cluster", "parity", "b64", "noComplete", "aligned",
}  # fmt: skip


def _check_modifiers(ins: Instruction, skip: int) -> None:
    for part in ins.parts[skip:]:
        if part not in _MODIFIERS:
            raise unknown(ins, f"modifier .{part}")


class _Group(NamedTuple):
    """Active lanes that agree on an operand tuple."""

    values: tuple[int, ...]
    lanes: NDArray[np.int64]
    everyone: bool


def _groups(g: Any, m: Any, *columns: Any) -> list[_Group]:
    if g.n == 1 and m is None:
        return [_Group(tuple(scalar_at(c, 0) for c in columns), np.zeros(1, np.int64), True)]
    lanes = active(m, g)
    if not lanes.size:
        return []
    rows = [lanes_of(c, g)[lanes] for c in columns]
    if all((r == r[0]).all() for r in rows):
        return [_Group(tuple(int(r[0]) for r in rows), lanes, True)]
    keys = list(zip(*(r.tolist() for r in rows), strict=True))
    return [
        _Group(key, lanes[np.array([k == key for k in keys])], False) for key in sorted(set(keys))
    ]


def decode_mbarrier(ins: Instruction) -> Op:
    """mbarrier.*; one table entry per operation."""
    name = ins.parts[1]
    skip = 2
    if name in ("arrive", "arrive_drop") and "expect_tx" in ins.parts:
        name, skip = name + ".expect_tx", 3
    decoder = _MBARRIER.get(name)
    if decoder is None:
        raise unknown(ins)
    _check_modifiers(ins, skip)
    return decoder(ins)


def _mbarrier_update(
    apply: Callable[[Any, Instruction, int, int], Any],
) -> Callable[[Instruction], Op]:
    """[address], value: `apply(cta, ins, address, value)` once per active lane."""

    def decode(ins: Instruction) -> Op:
        address, *rest = ins.operands

        def make(row: RowOf) -> Effect:
            at = address_reader(address, row)
            read = reader(rest[0], "u", row) if rest else (lambda g: np.uint32(0))

            def run(g: Any, m: Any) -> None:
                for group in _groups(g, m, at(g), read(g)):
                    for _ in group.lanes:
                        apply(g.cta, ins, *group.values)

            return run

        return effect(ins, make, reads=(address, *rest))

    return decode


def _arrive(drop: bool, with_tx: bool) -> Callable[[Instruction], Op]:
    def decode(ins: Instruction) -> Op:
        operands = list(ins.operands)
        state = operands.pop(0) if isinstance(operands[0], (Register, Sink)) else Sink()
        address, *rest = operands

        def make(row: RowOf) -> Effect:
            at = address_reader(address, row)
            default: Any = np.uint32(0 if with_tx else 1)
            relaxed = "relaxed" in ins.parts
            read = reader(rest[0], "u", row) if rest else (lambda g: default)
            write = writer(state, "q", row)

            def run(g: Any, m: Any) -> None:
                tokens = np.zeros(g.n, np.uint64)
                for group in _groups(g, m, at(g), read(g)):
                    where, value = group.values
                    barrier = g.cta.mbarrier(where)
                    g.cta.order.use_mbarrier(g, group.lanes, barrier, ins)
                    if not relaxed:
                        g.cta.order.release(g, group.lanes, barrier.arrivals)
                    for lane in group.lanes:
                        if with_tx:
                            barrier.expect_tx(value)
                        arrive = barrier.drop if drop else barrier.arrive
                        tokens[lane] = arrive(1 if with_tx else value)
                write(g, tokens, m)

            return run

        return effect(ins, make, writes=(state,), reads=(address, *rest))

    return decode


def _wait(ins: Instruction) -> Op:
    flag, address, phase = ins.operands[:3]
    parity, relaxed = "parity" in ins.parts, "relaxed" in ins.parts

    def make(row: RowOf) -> Effect:
        at = address_reader(address, row)
        read = reader(phase, "u" if parity else "q", row)
        target = row(flag)

        def run(g: Any, m: Any) -> list[Block]:
            blocks = []
            g.cta.machine.counters.mbarrier_waits += 1
            for group in _groups(g, m, at(g), read(g)):
                where, value = group.values
                barrier = g.cta.mbarrier(where)
                lanes = slice(None) if group.everyone and m is None else group.lanes
                bits = value if parity else value & 1
                g.cta.order.use_mbarrier(g, group.lanes, barrier, ins)
                passed = barrier.passed(bits)
                g.p[target][lanes] = passed
                if not passed:
                    wait = MBarrierWait(barrier, bits, g.p[target], lanes, relaxed)
                    blocks.append(Block(group.lanes, wait))
                elif not relaxed:
                    g.cta.order.acquire(g, group.lanes, barrier.done)
            return blocks

        return run

    return effect(ins, make, writes=(flag,), reads=(address, phase), alone=True)


def _init(ins: Instruction) -> Op:
    address, count = ins.operands

    def make(row: RowOf) -> Effect:
        at, read = address_reader(address, row), reader(count, "u", row)

        def run(g: Any, m: Any) -> None:
            addresses, counts = at(g), read(g)
            for lane in active(m, g):
                where = int(addresses[lane])
                barrier = g.cta.init_mbarrier(where, scalar_at(counts, lane), ins)
                g.cta.order.init_mbarrier(g, int(lane), barrier)

        return run

    return effect(ins, make, reads=(address, count))


_MBARRIER: dict[str, Callable[[Instruction], Op]] = {
    "init": _init,
    "inval": _mbarrier_update(lambda cta, ins, address, _: cta.drop_mbarrier(address)),
    "expect_tx": _mbarrier_update(lambda cta, ins, a, n: cta.mbarrier(a).expect_tx(n)),
    "complete_tx": _mbarrier_update(lambda cta, ins, a, n: cta.mbarrier(a).complete_tx(n)),
    "arrive": _arrive(drop=False, with_tx=False),
    "arrive.expect_tx": _arrive(drop=False, with_tx=True),
    "arrive_drop": _arrive(drop=True, with_tx=False),
    "arrive_drop.expect_tx": _arrive(drop=True, with_tx=True),
    "test_wait": _wait,
    "try_wait": _wait,
}


_BAR = re.compile(r"(bar|barrier)(\.cta)?\.(sync|arrive)(\.aligned)?$")


def decode_bar(ins: Instruction) -> Op:
    if ins.opcode == "bar.warp.sync":
        return effect(ins, lambda row: lambda g, m: None, collective="warp")
    if ins.opcode.startswith("barrier.cluster."):
        return _decode_cluster_barrier(ins)
    match = _BAR.match(ins.opcode)
    if match is None:
        raise unknown(ins)
    waits = match[3] == "sync"
    number, *count = ins.operands

    def make(row: RowOf) -> Effect:
        read_number = reader(number, "u", row)
        read_count = reader(count[0], "u", row) if count else (lambda g: np.uint32(0))

        def run(g: Any, m: Any) -> list[Block]:
            blocks = []
            for group in _groups(g, m, read_number(g), read_count(g)):
                barrier, generation, point = g.cta.arrive_at_barrier(g, group.lanes, *group.values)
                if waits and barrier.generation == generation:
                    blocks.append(Block(group.lanes, BarrierWait(barrier, generation, point)))
                elif waits:
                    g.cta.order.acquire(g, group.lanes, point)
            return blocks

        return run

    return effect(ins, make, reads=(number, *count), alone=True, collective="warp")


def _decode_cluster_barrier(ins: Instruction) -> Op:
    action = ins.parts[2]
    if action not in ("arrive", "wait"):
        raise unknown(ins)
    _check_modifiers(ins, 3)
    relaxed = "relaxed" in ins.parts

    def arrive(g: Any, m: Any) -> list[Block]:
        g.cta.arrive_at_cluster(g, active(m, g), relaxed)
        return []

    def wait(g: Any, m: Any) -> list[Block]:
        waiting = g.cta.cluster_phases(g, active(m, g))
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


def decode_fence(ins: Instruction) -> Op:
    """Memory fences; only fence.proxy.async matters here, for the proxy hazard check."""
    if not re.match(
        r"(fence(\.(proxy\.(async(\.\S+)?|alias|tensormap\S*)|mbarrier_init\.release\.cluster|"
        r"(sc|acq_rel|acquire|release)(\.\S+)?))|membar\.(cta|gl|sys|gpu))$",
        ins.opcode,
    ):
        raise unknown(ins)
    proxy = ins.opcode.startswith("fence.proxy.async")
    if not proxy and "mbarrier_init" not in ins.opcode:
        return effect(ins, lambda row: lambda g, m: None)

    def run(g: Any, m: Any) -> None:
        lanes = active(m, g)
        if lanes.size:
            g.cta.fence_mbarriers()
            if proxy:
                g.cta.order.fence(g, lanes)

    return effect(ins, lambda row: run)


def decode_setmaxnreg(ins: Instruction) -> Op:
    (count,) = ins.operands
    if not isinstance(count, Immediate) or ins.parts[1] not in ("inc", "dec"):
        raise unknown(ins)

    def run(g: Any, m: Any) -> None:
        g.cta.machine.counters.set_registers(count.value)
        for warp, _ in one_lane_per_warp(m, g):
            g.cta.pool.set(warp, count.value, ins)

    return effect(ins, lambda row: run)


def decode_nothing(ins: Instruction) -> Op:
    return effect(ins, lambda row: lambda g, m: None)


def decode_yield(ins: Instruction) -> Op:
    return effect(ins, lambda row: lambda g, m: None, ends=True, yields=True)


def decode_exit(ins: Instruction) -> Op:
    guard = (ins.guard,) if ins.guard else ()
    return Op(ins, reads=guard, exit=True)


def decode_trap(ins: Instruction) -> Op:
    def run(g: Any, m: Any) -> None:
        if active(m, g).size:
            raise EmulationError("the kernel executed trap")

    return effect(ins, lambda row: run, ends=True)


def decode_branch(ins: Instruction) -> Op:
    guard = (ins.guard,) if ins.guard else ()
    if ins.opcode not in ("bra", "bra.uni"):
        raise unknown(ins)
    return Op(ins, reads=guard, branch=ins.operands[0].position)


SYNC_OPS: dict[str, Callable[[Instruction], Op]] = {
    "mbarrier": decode_mbarrier,
    "bar": decode_bar,
    "barrier": decode_bar,
    "fence": decode_fence,
    "membar": decode_fence,
    "setmaxnreg": decode_setmaxnreg,
    "griddepcontrol": decode_nothing,
    "pmevent": decode_nothing,
    "nanosleep": decode_yield,
    "bra": decode_branch,
    "ret": decode_exit,
    "exit": decode_exit,
    "trap": decode_trap,
}
