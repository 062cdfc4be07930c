"""Shadow memory of a CTA: the last write and the latest reads of every four bytes, and races.

Each access is checked against those before it when it is issued. So a missing wait shows in every
schedule, also where the data happens to arrive in time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .access_log import ATOMIC, GENERIC, NARROW, Ids
from .memory import SHARED_BASE
from .ptx_ir import Instruction

Words = NDArray[np.int64]

_AFTER_WRITE = {
    "mbarrier": "before its bulk load landed",
    "copy": "before its cp.async landed",
    "warp": "with no synchronisation after its write",
}
_AFTER_READ = {
    "wgmma": "while a wgmma still reads it",
    "bulk": "while a bulk store still reads it",
    "mbarrier": "while a bulk copy still reads it",
    "warp": "with no synchronisation after its read",
}

EXITED = "CTA of the cluster has exited"


class Actor(NamedTuple):
    """Who makes an access: the entity and its clock, and who must know of the earlier ones."""

    entity: int
    clock: int
    name: str
    warp: int
    """Row of the issuing warp."""
    ins: Instruction


class Shadow:
    """Accesses of one CTA's shared memory."""

    def __init__(self, tracker: Any, cta: Any, nbytes: int) -> None:
        self._tracker = tracker
        self._cta = cta
        self._log = tracker.log
        self._clocks = tracker.clocks
        words = (nbytes + 15) // 16 * 4
        self._writes: Ids = np.zeros(words, np.int32)
        self._reads: Ids = np.zeros((4, words), np.int32)
        self._readers: NDArray[np.int32] = np.zeros(0, np.int32)
        self._latest: Ids = np.zeros(0, np.int32)
        self._rows: dict[int, int] = {}

    def _row(self, entity: int) -> int:
        """The row of an entity's reads."""
        row = self._rows.get(entity)
        if row is None:
            row = self._rows[entity] = len(self._rows)
            if row == len(self._reads):
                self._reads = np.concatenate([self._reads, np.zeros_like(self._reads)])
            self._readers = np.append(self._readers, np.int32(entity))
            self._latest = np.append(self._latest, np.int32(0))
        return row

    # Generic proxy

    def generic(
        self, addresses: Words, nbytes: int, warps: Words, ins: Instruction, *, write: bool,
        flags: int,
    ) -> None:  # fmt: skip
        """Lanes of the given warps (rows) read or write `nbytes` each."""
        words = (addresses - SHARED_BASE >> 2)[None, :]
        if nbytes > 4:
            words = words + np.arange(nbytes >> 2)[:, None]
        first, last = int(warps.min()), int(warps.max())
        if first == last:
            warps = warps[:1]
        strong = flags & (ATOMIC | NARROW)
        self._check_writes(words, warps, ins, strong, read=not write)
        if write:
            self._check_reads(words, warps, ins, strong)
        span = slice(first, last + 1)
        number = self._log.add(
            span, self._clocks.now_of(span), flags | GENERIC, ins,
            [self._tracker.warp_name(w) for w in range(first, last + 1)],
        )  # fmt: skip
        numbers = (warps - first + number).astype(np.int32)
        if write:
            self._writes[words] = numbers
            return
        rows = np.array([self._row(w) for w in range(first, last + 1)])
        self._reads[rows[warps - first], words] = numbers
        self._latest[rows] = np.arange(number, number + len(rows))

    def _check_writes(
        self, words: Words, warps: Words, ins: Instruction, strong: int, *, read: bool
    ) -> None:
        ids = self._writes[words]
        log = self._log
        late = log.clock[ids] > self._clocks.known[warps, log.entity[ids]]
        if strong:
            late &= log.flags[ids] & strong == 0
        if late.any():
            self._report(ins, words, ids, late, warps, _AFTER_WRITE,
                         "read" if read else "overwritten")  # fmt: skip
        elif read and not ids.all() and not strong and ins.parts[0] == "ld":
            self._uninitialised(words, ids, warps, ins)

    def _uninitialised(self, words: Words, ids: Ids, warps: Words, ins: Instruction) -> None:
        at = np.argwhere(ids == 0)[0]
        warp = int(warps[at[-1] if warps.size > 1 else 0])
        self._tracker.hazards.report(
            "uninitialised shared memory read", ins, self._cta,
            f"nothing was written to {_address(int(words[tuple(at)])):#x}",
            who=self._tracker.warp_name(warp),
        )  # fmt: skip

    def _check_reads(self, words: Words, warps: Words, ins: Instruction, strong: int) -> None:
        log = self._log
        rows = np.unique(warps)
        known = self._clocks.known[np.ix_(rows, self._readers)]
        for row in np.nonzero((log.clock[self._latest] > known).any(axis=0))[0]:
            ids = self._reads[row][words]
            late = log.clock[ids] > self._clocks.known[warps, log.entity[ids]]
            if strong:
                late &= log.flags[ids] & strong == 0
            if late.any():
                self._report(ins, words, ids, late, warps, _AFTER_READ, "overwritten")

    def copy_write(self, addresses: Words, nbytes: int, actor: Actor, flags: int) -> None:
        """Scattered bytes of a warp that may change until the actor's clock is known."""
        words = (addresses - SHARED_BASE >> 2)[None, :] + np.arange(nbytes >> 2)[:, None]
        warps = np.array([actor.warp])
        strong = flags & ATOMIC
        self._check_writes(words, warps, actor.ins, strong, read=False)
        self._check_reads(words, warps, actor.ins, strong)
        self._writes[words] = self._record(actor, flags)

    # Async proxy

    def async_write(self, lo: int, nbytes: int, actor: Actor) -> None:
        """Bytes that from now on may change at any time, until the actor's clock is known."""
        span = slice(lo - SHARED_BASE >> 2, lo + nbytes - SHARED_BASE + 3 >> 2)
        log, warp = self._log, np.array([actor.warp])
        known = self._clocks.known[actor.warp]
        words = np.arange(span.start, span.stop)
        self._check_async(words, self._writes[span], known, self._clocks.fenced[actor.warp], actor,
                          "overwritten")  # fmt: skip
        for row in np.nonzero(log.clock[self._latest] > known[self._readers])[0]:
            ids = self._reads[row, span]
            late = log.clock[ids] > known[log.entity[ids]]
            if late.any():
                self._report(actor.ins, words, ids, late, warp, _AFTER_READ, "overwritten")
        self._writes[span] = self._record(actor)

    def _record(self, actor: Actor, flags: int = 0) -> int:
        span = slice(actor.entity, actor.entity + 1)
        number: int = self._log.add(span, actor.clock, flags, actor.ins, [actor.name])
        return number

    def async_read(self, lo: int, nbytes: int, actor: Actor) -> None:
        """Consecutive bytes that are read until the actor's clock is known."""
        span = slice(lo - SHARED_BASE >> 2, lo + nbytes - SHARED_BASE + 3 >> 2)
        clocks = self._clocks
        self._check_async(
            np.arange(span.start, span.stop), self._writes[span], clocks.known[actor.warp],
            clocks.fenced[actor.warp], actor, "read",
        )  # fmt: skip
        row = self._row(actor.entity)
        self._reads[row, span] = self._latest[row] = self._record(actor)

    def wgmma_read(
        self, a: list[Words], b: Words, every: Words, actor: Actor, warps: slice
    ) -> None:
        """A wgmma's operands, as 16-byte pieces: A's rows by warp, B, and both together."""
        clocks = self._clocks
        pieces = self._writes.view(np.complex128)
        known, fenced = actor_knowledge(clocks, warps)
        ids = pieces[every].view(np.int32)
        if not self._ordered(ids, known, fenced):
            self._check_async(_words(b), pieces[b].view(np.int32), known, fenced, actor, "read")
            for quarter, part in enumerate(a):
                warp = warps.start + quarter
                self._check_async(
                    _words(part), pieces[part].view(np.int32), clocks.known[warp],
                    clocks.fenced[warp], actor._replace(warp=warp), "read",
                )  # fmt: skip
        row = self._row(actor.entity)
        number = self._latest[row] = self._record(actor)
        mark = np.full(4, number, np.int32).view(np.complex128)
        self._reads[row].view(np.complex128)[every] = mark

    def _ordered(self, ids: Ids, known: Any, fenced: Any) -> bool:
        """Are all these writes known, and past a proxy fence where they need one?"""
        log, first = self._log, ids[0]
        if (ids == first).all():
            entity, clock = log.entity[first], log.clock[first]
            return bool(
                clock <= known[entity]
                and (not log.flags[first] & GENERIC or clock <= fenced[entity])
            )
        entities, clocks = log.entity[ids], log.clock[ids]
        if (clocks > known[entities]).any():
            return False
        return not ((clocks > fenced[entities]) & (log.flags[ids] & GENERIC != 0)).any()

    def _check_async(
        self, words: Words, ids: Ids, known: Any, fenced: Any, actor: Actor, verb: str
    ) -> None:
        if self._ordered(ids, known, fenced):
            return
        log, warp = self._log, np.array([actor.warp])
        late = log.clock[ids] > known[log.entity[ids]]
        if late.any():
            self._report(actor.ins, words, ids, late, warp, _AFTER_WRITE, verb)
            return
        unfenced = (log.clock[ids] > fenced[log.entity[ids]]) & (log.flags[ids] & GENERIC != 0)
        at = int(np.argmax(unfenced))
        number = int(ids[at])
        self._tracker.hazards.report(
            "missing fence.proxy.async", actor.ins, self._cta,
            f"shared {_address(int(words[at])):#x} is {verb} by the async proxy; the generic write "
            f"by {log.actor(number)} has no proxy fence behind it",
            who=actor.name, other=log.instruction(number),
        )  # fmt: skip

    def leave(self, own: slice) -> None:
        """The CTA of these warps exits: what others did to its memory must have come before."""
        log, warps = self._log, self._clocks.warps
        known = self._clocks.knowledge(own).known
        for verb, ids in (("write", self._writes), ("read", self._reads)):
            found = np.unique(ids)
            entity, clock = log.entity[found], log.clock[found]
            others = (entity < own.start) | (entity >= own.stop) & (entity < warps)
            for number in found[others & (clock > known[entity])].tolist():
                self._tracker.hazards.report(
                    EXITED, log.instruction(number), self._cta,
                    f"nothing orders this {verb} of its shared memory before its end",
                    who=f"{log.actor(number)}, and the exit",
                )  # fmt: skip

    # Reports

    def _report(
        self, ins: Instruction, words: Words, ids: Ids, late: Any, warps: Words,
        how: dict[str, str], verb: str,
    ) -> None:  # fmt: skip
        at = tuple(np.argwhere(late)[0])
        number = int(ids[at])
        kind = self._tracker.kind(int(self._log.entity[number]))
        warp = int(warps[at[-1] if warps.size > 1 else 0])
        self._tracker.hazards.report(
            f"shared memory {verb} {how.get(kind, how['warp'])}", ins, self._cta,
            f"at {_address(int(words[at])):#x}, by {self._log.actor(number)}",
            who=self._tracker.warp_name(warp), other=self._log.instruction(number),
        )  # fmt: skip


def actor_knowledge(clocks: Any, warps: slice) -> tuple[Any, Any]:
    """What each of the warps knows, at least."""
    return clocks.known[warps].min(axis=0), clocks.fenced[warps].min(axis=0)


def _words(pieces: Words) -> Words:
    words: Words = (4 * pieces[:, None] + np.arange(4)).reshape(-1)
    return words


def _address(word: int) -> int:
    return SHARED_BASE + 4 * word
