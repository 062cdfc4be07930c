"""Runs the threads of one cluster: sets of threads at one segment, split and merged."""

from __future__ import annotations

import traceback
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .barriers import MBarrier
from .codegen import Program, Segment, function_of
from .cta import Cta
from .decode import Op
from .errors import DeadlockError, EmulationError
from .lane_groups import flags_to_mask, mask_of
from .register_rules import FenceRule
from .waiting import Block, Condition, MBarrierWait

# A try_wait may return false; after this many fruitless rounds over all threads it is a deadlock.
_REFUSAL_ROUNDS = 6


class Fragment:
    """Threads of a CTA (a bit mask) at the start of a segment, running or blocked."""

    __slots__ = ("at", "condition", "cta", "ran", "threads", "yielded")

    def __init__(self, cta: Cta, threads: int, at: int) -> None:
        self.cta = cta
        self.threads = threads
        self.at = at
        self.condition: Condition | None = None
        self.yielded = False
        self.ran = 0
        """The step that it ran in last."""


def _turn(f: Fragment) -> tuple[bool, int, int, int]:
    """Who goes first: the lowest, so that threads reconverge; pollers one after the other."""
    return f.yielded, f.ran if f.yielded else 0, f.cta.rank, f.at


def _warp_range(threads: int) -> tuple[int, int]:
    """The first and the last warp of a thread mask."""
    return (threads & -threads).bit_length() - 1 >> 5, threads.bit_length() - 1 >> 5


class ClusterScheduler:
    """All fragments of the CTAs of one cluster."""

    def __init__(self, machine: Any, ctas: list[Cta]) -> None:
        self.machine = machine
        self.program: Program = machine.program
        self.ctas = ctas
        self.fragments = [Fragment(cta, cta.live, 0) for cta in ctas]
        self._refusals = 0
        self._steps = 0
        self._polled = False
        """Whether any thread ever polled."""
        self._priority: dict[tuple[int, int], int] = {}
        self._favoured_steps = 0
        self._masks: dict[tuple[int, int, int], NDArray[np.bool_]] = {}
        self._warp_masks: dict[tuple[int, int], int] = {}

    @property
    def done(self) -> bool:
        return not self.fragments

    def step(self) -> bool:
        """Run one fragment; False when none can go on."""
        fragment = self._pick()
        if fragment is None:
            return False
        self._run(fragment)
        return True

    def blocked(self) -> list[Fragment]:
        return [f for f in self.fragments if f.condition is not None]

    def awaited(self) -> list[MBarrier]:
        """The mbarriers that threads wait for."""
        conditions = [f.condition for f in self.fragments]
        return [c.barrier for c in conditions if isinstance(c, MBarrierWait)]

    # Choice of what runs

    def _pick(self) -> Fragment | None:
        ready: list[Fragment] = []
        for fragment in self.fragments:
            condition = fragment.condition
            if condition is not None:
                if not condition.ready():
                    continue
                condition.resume()
                first, last = _warp_range(fragment.threads)
                fragment.cta.order.acquire_warps(slice(first, last + 1), condition.point())
                fragment.condition = None
                self._refusals = 0
            ready.append(fragment)
        for fragment in self._order(ready):
            if fragment not in self.fragments:
                continue  # merged into one before it, which could not go on all the same
            merged = self._merge(fragment, ready)
            if self._converged(merged):
                return merged
        return None

    def _order(self, ready: list[Fragment]) -> list[Fragment]:
        work = self.machine.async_work
        if len(ready) < 2:
            return ready
        if work.schedule != "random":
            return sorted(ready, key=_turn)
        shuffled = work.random.sample(ready, len(ready))
        if self._favour():
            shuffled.sort(key=lambda f: self._priority[f.cta.rank, _warp_range(f.threads)[0]])
        # The lowest of the fragments that share a warp goes first: threads reconverge.
        chosen = []
        for fragment in sorted(shuffled, key=lambda f: f.yielded):
            warps = self._warps(fragment)
            rivals = [f for f in ready if f.cta is fragment.cta and self._warps(f) & warps]
            lowest = min(rivals, key=_turn)
            if lowest not in chosen:
                chosen.append(lowest)
        return chosen + [f for f in shuffled if f not in chosen]

    def _favour(self) -> bool:
        """Whether some warps now run ahead of others; drawn anew every few or many steps."""
        random = self.machine.async_work.random
        if self._favoured_steps == 0:
            self._favoured_steps = random.choice((8, 64, 512))
            warps = [(c.rank, w) for c in self.ctas for w in range((c.threads + 31) // 32)]
            order = random.sample(warps, len(warps)) if random.random() < 0.6 else []
            self._priority = {warp: i for i, warp in enumerate(order)}
        self._favoured_steps -= 1
        return bool(self._priority)

    def _warps(self, fragment: Fragment) -> int:
        return self._cover(fragment.threads, 32)

    def _cover(self, threads: int, width: int) -> int:
        """The mask of all threads in the aligned blocks of `width` that `threads` touches."""
        key = (threads, width)
        found = self._warp_masks.get(key)
        if found is None:
            found, block, at = 0, (1 << width) - 1, 0
            while threads >> at:
                if threads >> at & block:
                    found |= block << at
                at += width
            self._warp_masks[key] = found
        return found

    def _merge(self, fragment: Fragment, ready: list[Fragment]) -> Fragment:
        work = self.machine.async_work
        for other in ready:
            if other is fragment or other.cta is not fragment.cta or other.at != fragment.at:
                continue
            if other not in self.fragments or other.condition is not None:
                continue
            if work.schedule == "random" and not self._warps(other) & self._warps(fragment):
                needs_all = self.program.segments[fragment.at].collective == "warpgroup"
                if not needs_all and work.random.random() < 0.5:
                    continue
            fragment.threads |= other.threads
            fragment.yielded &= other.yielded
            self.fragments.remove(other)
        return fragment

    def only_polls(self) -> bool:
        """Can nothing run but what has polled in vain?

        Lanes that wait for the rest of their warp to reach a collective operation cannot.
        """
        return self._polled and all(
            f.yielded or not self._converged(f) for f in self.fragments if f.condition is None
        )

    def _converged(self, fragment: Fragment) -> bool:
        kind = self.program.segments[fragment.at].collective
        if not kind:
            return True
        width = 32 if kind == "warp" else 128
        needed = self._cover(fragment.threads, width) & fragment.cta.live
        if needed == fragment.threads:
            return True
        return self._members(fragment) & needed & ~fragment.threads == 0

    def _members(self, fragment: Fragment) -> int:
        """The threads in the member masks of an operation of part of a warp."""
        read = self.program.segments[fragment.at].members
        threads = fragment.threads
        if read is None:
            return -1
        lo, hi = (threads & -threads).bit_length() - 1, threads.bit_length()
        gang = fragment.cta.registers.gang(lo, hi)
        gang.cta = fragment.cta
        masks = np.broadcast_to(np.asarray(read(gang)), (gang.n,))
        members = 0
        for thread in range(lo, hi):
            if threads >> thread & 1:
                members |= int(masks[thread - lo]) << (thread & ~31)
        return members

    # Execution

    def _run(self, fragment: Fragment) -> None:
        segment = self.program.segments[fragment.at]
        if segment.collective:
            self._close_ranks(fragment)
        self._steps += 1
        fragment.ran = self._steps
        cta, threads = fragment.cta, fragment.threads
        lo, hi = (threads & -threads).bit_length() - 1, threads.bit_length()
        full = threads >> lo == (1 << (hi - lo)) - 1
        mask = None if full else self._mask(threads, lo, hi)
        gang = cta.registers.gang(lo, hi)
        gang.cta = cta
        function = segment.functions.get(not full) or function_of(self.program, segment, not full)
        if segment.rule is not None:
            self._check_registers(segment, segment.rule, cta, lo, hi)
        segment.warps_executed += hi - 1 - lo + 32 >> 5 if full else self._warp_count(threads)
        segment.lanes_executed += threads.bit_count()
        try:
            blocks = function(gang, mask)
        except (EmulationError, ValueError, IndexError) as error:
            raise self._located(error, segment, not full, fragment) from error
        if segment.yields:
            fragment.yielded = self._polled = True
        elif segment.acts and self._polled:
            self._wake_yielded()
        self._leave(fragment, segment, gang, blocks if segment.blocking else None)
        self.machine.async_work.tick()

    def _close_ranks(self, fragment: Fragment) -> None:
        """Leave warps behind a gap to a fragment of their own, which runs on its own.

        A collective operation takes every warp from the first to the last.
        """
        warps = self._warps(fragment)
        behind = warps & warps + (warps & -warps) & fragment.threads
        if behind:
            fragment.threads &= ~behind
            other = Fragment(fragment.cta, behind, fragment.at)
            other.yielded, other.ran = fragment.yielded, fragment.ran
            self.fragments.append(other)

    def _wake_yielded(self) -> None:
        for other in self.fragments:
            other.yielded = False

    def _warp_count(self, threads: int) -> int:
        return self._cover(threads, 32).bit_count() // 32

    def _mask(self, threads: int, lo: int, hi: int) -> NDArray[np.bool_]:
        key = (threads, lo, hi)
        mask = self._masks.get(key)
        if mask is None:
            raw = (threads >> lo).to_bytes((hi - lo + 7) // 8, "little")
            bits = np.unpackbits(np.frombuffer(raw, np.uint8), bitorder="little")
            mask = self._masks[key] = bits[: hi - lo].astype(np.bool_)
        return mask

    def _leave(
        self, fragment: Fragment, segment: Segment, gang: Any, blocks: list[Block] | None
    ) -> None:
        if segment.branch is not None:
            self._branch(fragment, segment, gang)
        elif segment.exit:
            self._exit(fragment, segment, gang)
        else:
            fragment.at += 1
        for block in blocks or ():
            threads = mask_of(block.lanes, gang.lo, gang.n)
            if threads == fragment.threads:
                fragment.condition = block.condition
                return
            fragment.threads &= ~threads
            waiting = Fragment(fragment.cta, threads, fragment.at)
            waiting.condition = block.condition
            self.fragments.append(waiting)
        if not fragment.threads:
            self.fragments.remove(fragment)

    def _guarded(self, op: Op | None, gang: Any, threads: int) -> int:
        """The threads whose guard is true."""
        assert op is not None
        guard = op.ins.guard
        if guard is None:
            return threads
        flags = gang.p[self.program.row_of[guard]]
        true = flags_to_mask(flags, gang.lo)
        return threads & ~true if op.ins.guard_negated else threads & true

    def _branch(self, fragment: Fragment, segment: Segment, gang: Any) -> None:
        taken = self._guarded(segment.branch_op, gang, fragment.threads)
        assert segment.branch is not None
        if taken == fragment.threads:
            fragment.at = segment.branch
            return
        fragment.at += 1
        if taken:
            fragment.threads &= ~taken
            other = Fragment(fragment.cta, taken, segment.branch)
            other.yielded, other.ran = fragment.yielded, fragment.ran
            self.fragments.append(other)

    def _exit(self, fragment: Fragment, segment: Segment, gang: Any) -> None:
        gone = fragment.threads
        if segment.branch_op is not None:
            gone = self._guarded(segment.branch_op, gang, gone)
        fragment.threads &= ~gone
        fragment.at += 1
        cta = fragment.cta
        if gone:
            cta.exit_threads(gone)
            if not cta.live:
                cta.finish()

    # No progress

    def refuse_waits(self) -> bool:
        """Let blocked try_waits return false, a few rounds long."""
        if self._refusals >= _REFUSAL_ROUNDS:
            return False
        released = False
        for fragment in self.blocked():
            assert fragment.condition is not None
            if fragment.condition.give_up():
                fragment.condition = None
                fragment.yielded = self._polled = True
                released = True
        self._refusals += 1
        return released

    def deadlock(self) -> DeadlockError:
        """Every blocked warp with its PTX line and what it waits for."""
        lines = ["deadlock: no warp can go on and no asynchronous work is left"]
        for fragment in sorted(self.fragments, key=lambda f: (f.cta.serial, f.threads)):
            warps = [w for w in range(fragment.threads.bit_length() + 31 >> 5)
                     if fragment.threads >> 32 * w & 0xFFFFFFFF]  # fmt: skip
            if fragment.condition is not None:
                op = self.program.segments[fragment.at - 1].first
                reason = "waits for " + fragment.condition.describe()
            else:
                op = self.program.segments[fragment.at].first
                reason = "waits for the other threads of its warp or warpgroup"
            where = op.ins.where if op is not None else "end of kernel"
            lines.append(f"  CTA {fragment.cta.index} warps {warps}: {reason}; {where}")
        return DeadlockError("\n".join(lines))

    # Reports

    def _check_registers(
        self, segment: Segment, rule: FenceRule, cta: Cta, lo: int, hi: int
    ) -> None:
        accumulators, fragments = cta.in_flight(lo, hi)
        if accumulators & rule.touched:
            self._report_touch(
                segment, cta, accumulators, "accumulator touched while its wgmma is in flight", True
            )
        if fragments & rule.written:
            self._report_touch(
                segment, cta, fragments, "A operand written while its wgmma is in flight", False
            )
        for group in range(lo >> 7, (hi - 1 >> 7) + 1):
            cta.fences.run(group, rule)

    def _report_touch(self, segment: Segment, cta: Cta, rows: int, kind: str, reads: bool) -> None:
        for op in segment.ops:
            if op.accumulators:
                continue
            for register in (*(op.reads if reads else ()), *op.writes):
                if register.bank == "u" and rows >> self.program.row_of[register] & 1:
                    self.machine.hazards.report(
                        kind, op.ins, cta, f"register {register.name} before wgmma.wait_group"
                    )
                    return

    def _located(
        self, error: Exception, segment: Segment, masked: bool, fragment: Fragment
    ) -> Exception:
        """The same error with the PTX line, warps and CTA."""
        op = None
        for frame, number in traceback.walk_tb(error.__traceback__):
            if frame.f_code.co_name == "segment":
                op = segment.line_ops[masked].get(number)
        first, last = _warp_range(fragment.threads)
        where = op.ins.where if op is not None else f"segment {segment.index}"
        kind = type(error) if isinstance(error, EmulationError) else EmulationError
        return kind(f"{error}; {where}; warps {first}..{last} of CTA {fragment.cta.index}")
