"""Synchronisation opcodes: mbarrier, fences, register counts, branches and exits."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from .decode import Effect, Op, RowOf, effect, unknown
from .errors import EmulationError
from .lane_groups import groups
from .operands import active, address_reader, one_lane_per_warp, reader, scalar_at, writer
from .ops_barrier import decode_bar
from .ptx_ir import Immediate, Instruction, Register, Sink
from .waiting import Block, MBarrierWait

_MODIFIERS = {
    "relaxed", "acquire", "release", "cta", "cluster", "shared", "shared::cta",
    "shared::cluster", "parity", "b64", "noComplete", "aligned",
}  # fmt: skip


# The state of an arrival: its phase, and above it the pending count before it.
_PENDING_SHIFT = 32


def _check_modifiers(ins: Instruction, skip: int) -> None:
    for part in ins.parts[skip:]:
        if part not in _MODIFIERS:
            raise unknown(ins, f"modifier .{part}")


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
                for group in groups(g, m, at(g), read(g)):
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
                for group in groups(g, m, at(g), read(g)):
                    where, value = group.values
                    barrier = g.cta.mbarrier(where)
                    g.cta.resolve_shared(where)[0].check_live(ins, g.cta)
                    g.cta.order.use_mbarrier(g, group.lanes, barrier, ins)
                    released = -1
                    for lane in group.lanes.tolist():
                        # One after the other: an arrival that completes the phase leaves those
                        # after it out.
                        if not relaxed and (warp := lane + g.lo >> 5) != released:
                            g.cta.order.release_warp(warp, barrier.arrivals)
                            released = warp
                        if with_tx:
                            barrier.expect_tx(value)
                        pending = barrier.pending
                        arrive = barrier.drop if drop else barrier.arrive
                        phase = arrive(1 if with_tx else value)
                        tokens[lane] = pending << _PENDING_SHIFT | phase
                write(g, tokens, m)

            return run

        return effect(ins, make, writes=(state,), reads=(address, *rest))

    return decode


def _pending_count(ins: Instruction) -> Op:
    """The pending count that the state of an arrival holds."""
    dst, state = ins.operands

    def make(row: RowOf) -> Effect:
        read, write = reader(state, "q", row), writer(dst, "u", row)
        shift = np.uint64(_PENDING_SHIFT)
        return lambda g, m: write(g, (np.asarray(read(g)) >> shift).astype(np.uint32), m)

    return effect(ins, make, writes=(dst,), reads=(state,), ordered=False)


def _wait(ins: Instruction) -> Op:
    flag, address, phase = ins.operands[:3]
    parity, relaxed = "parity" in ins.parts, "relaxed" in ins.parts

    def make(row: RowOf) -> Effect:
        at = address_reader(address, row)
        read = reader(phase, "u" if parity else "q", row)
        target = row(flag)

        def run(g: Any, m: Any) -> list[Block]:
            blocks = []
            g.cta.machine.counters.mbarrier_waits += g.last_warp - g.first_warp + 1
            for group in groups(g, m, at(g), read(g)):
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
                barrier.initialiser = int(lane) + g.lo >> 5
                g.cta.order.init_mbarrier(barrier)

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
    "pending_count": _pending_count,
    "test_wait": _wait,
    "try_wait": _wait,
}


def decode_fence(ins: Instruction) -> Op:
    """Memory fences; only fence.proxy.async matters here, for the proxy hazard check."""
    if not re.match(
        r"(fence(\.(proxy\.(async(\.(global|shared::(cta|cluster)))?|alias|tensormap::generic"
        r"(\.(acquire|release)\.(cta|cluster|gpu|sys))?)|mbarrier_init\.release\.cluster|"
        r"(sc|acq_rel|acquire|release)(\.(cta|cluster|gpu|sys))?))|membar\.(cta|gl|sys|gpu))$",
        ins.opcode,
    ):
        raise unknown(ins)
    proxy = ins.opcode.startswith("fence.proxy.async")
    if not proxy and "mbarrier_init" not in ins.opcode:
        return effect(ins, lambda row: lambda g, m: g.cta.machine.global_order.fence(g.cta))

    space = ins.opcode.partition("async")[2]

    def run(g: Any, m: Any) -> None:
        lanes = active(m, g)
        if not lanes.size:
            return
        order = g.cta.order
        if proxy and space in ("", ".global"):
            order.fence_global(g, lanes)
        if space != ".global":
            g.cta.fence_mbarriers({warp for warp, _ in one_lane_per_warp(m, g)})
            (order.fence if proxy else order.fence_inits)(g, lanes)

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


def decode_griddepcontrol(ins: Instruction) -> Op:
    """Launches run one after the other; the wait is noted, to be missed where it is not there."""
    waits = ins.parts[-1] == "wait"
    return effect(ins, lambda row: lambda g, m: waits and g.cta.machine.global_order.wait(g.cta))


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
    "griddepcontrol": decode_griddepcontrol,
    "pmevent": decode_nothing,
    "nanosleep": decode_yield,
    "bra": decode_branch,
    "ret": decode_exit,
    "exit": decode_exit,
    "trap": decode_trap,
}
