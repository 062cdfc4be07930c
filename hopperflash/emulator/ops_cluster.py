"""Work that lands in the shared memory of another CTA: st.async, red.async, bulk reductions."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .bulk_loads import BulkLoad, Target, targets
from .decode import Effect, Op, RowOf, effect, unknown
from .memory import CLUSTER_SHIFT, unsigned
from .operands import active, address_reader, lanes_of, one_lane_per_warp, reader, scalar_at, writer
from .ptx_ir import Instruction, Vector
from .tensor_map import combine

_STORE = re.compile(
    r"st\.async(\.weak)?\.shared::cluster\.mbarrier::complete_tx::bytes(\.v[24])?"
    r"\.(?P<kind>[busf](?:32|64))$"
)
_REDUCE = re.compile(
    r"red\.async(\.relaxed)?(\.cluster)?\.shared::cluster\.mbarrier::complete_tx::bytes"
    r"\.(?P<op>inc|dec|min|max|add|and|or|xor)\.(?P<kind>[bus](?:32|64))$"
)
_BULK_REDUCE = re.compile(
    r"cp\.reduce\.async\.bulk\.shared::cluster\.shared::cta\.mbarrier::complete_tx::bytes"
    r"\.(?P<op>and|or|xor|add|inc|dec|min|max)\.(?P<kind>[bus](?:32|64))$"
)


class RemoteValue(BulkLoad):
    """The value of one lane on its way to a CTA of the cluster, through the generic proxy."""

    alignment = 4
    is_bulk = False

    def __init__(
        self, cta: Any, ins: Instruction, where: list[Target], value: NDArray[np.uint8],
        operation: tuple[str, str] | None,
    ) -> None:  # fmt: skip
        super().__init__(cta, ins, where, 0, value.size, True)
        self.shared_source = None
        self._value, self._operation = value, operation

    def _order(self, target: Target, barrier: Any, span: slice, warp: int) -> None:
        reduces = self._operation is not None
        self.cta.order.remote_store(target.cta, barrier, span, warp, self.ins, reduces)

    def _fetch(self) -> tuple[NDArray[np.uint8], int]:
        return self._value, 0

    def _place(self, target: Target, data: NDArray[np.uint8]) -> None:
        _combine_into(target, data, self._operation)


class BulkReduce(BulkLoad):
    """cp.reduce.async.bulk into the shared memory of a CTA of the cluster."""

    def __init__(
        self, cta: Any, ins: Instruction, where: list[Target], span: slice,
        operation: tuple[str, str],
    ) -> None:  # fmt: skip
        super().__init__(cta, ins, where, span.start, span.stop - span.start, True)
        self._operation = operation

    def _place(self, target: Target, data: NDArray[np.uint8]) -> None:
        _combine_into(target, data, self._operation)


def _combine_into(
    target: Target, data: NDArray[np.uint8], operation: tuple[str, str] | None
) -> None:
    view = target.cta.shared.bytes_at(target.address, data.size)
    if operation is None:
        view[:] = data
        return
    op, kind = operation
    raw = unsigned(int(kind[1:]) // 8)
    element = kind.replace("b", "u")
    view[:] = combine(view.view(raw), data.view(raw), element, op).view(np.uint8)


def _decode_remote(pattern: re.Pattern[str]) -> Callable[[Instruction], Op]:
    def decode(ins: Instruction) -> Op:
        match = pattern.match(ins.opcode)
        if match is None:
            raise unknown(ins)
        address, value, barrier = ins.operands
        items = value.items if isinstance(value, Vector) else (value,)
        operation = (match["op"], match["kind"]) if "op" in match.groupdict() else None
        kind = unsigned(int(match["kind"][1:]) // 8)

        def make(row: RowOf) -> Effect:
            to, signal = address_reader(address, row), address_reader(barrier, row)
            view = {4: "u", 8: "q"}[np.dtype(kind).itemsize]
            readers = [reader(i, view, row) for i in items]

            def run(g: Any, m: Any) -> None:
                columns = np.stack([lanes_of(r(g), g).astype(kind) for r in readers], axis=1)
                for lane in active(m, g):
                    where = targets(g.cta, int(to(g)[lane]), int(signal(g)[lane]), None)
                    data = columns[lane].copy().view(np.uint8)
                    RemoteValue(g.cta, ins, where, data, operation).submit(int(lane) + g.lo >> 5)

            return run

        return effect(ins, make, reads=(address, value, barrier))

    return decode


def decode_bulk_reduce(ins: Instruction) -> Op:
    match = _BULK_REDUCE.match(ins.opcode)
    if match is None:
        raise unknown(ins)
    dst, source, size, barrier = ins.operands

    def make(row: RowOf) -> Effect:
        to, frm, signal = (address_reader(a, row) for a in (dst, source, barrier))
        read_size = reader(size, "u", row)

        def run(g: Any, m: Any) -> None:
            for warp, lane in one_lane_per_warp(m, g):
                where = targets(g.cta, int(to(g)[lane]), int(signal(g)[lane]), None)
                start = int(frm(g)[lane])
                span = slice(start, start + scalar_at(read_size(g), lane))
                BulkReduce(g.cta, ins, where, span, (match["op"], match["kind"])).submit(warp)

        return run

    return effect(ins, make, reads=(dst, source, size, barrier))


def decode_getctarank(ins: Instruction) -> Op:
    """The rank of the CTA that a shared::cluster address lies in."""
    if ins.opcode not in ("getctarank.shared::cluster.u32", "getctarank.u32",
                          "getctarank.u64", "getctarank.shared::cluster.u64"):  # fmt: skip
        raise unknown(ins)
    dst, source = ins.operands
    view = "q" if ins.opcode.endswith("64") else "u"

    def make(row: RowOf) -> Effect:
        read, write = reader(source, view, row), writer(dst, "u", row)

        def run(g: Any, m: Any) -> None:
            named = np.asarray(read(g)).astype(np.int64) >> CLUSTER_SHIFT
            write(g, np.where(named == 0, g.cta.rank, named - 1).astype(np.uint32), m)

        return run

    return effect(ins, make, writes=(dst,), reads=(source,), ordered=False)


CLUSTER_OPS: dict[str, Callable[[Instruction], Op]] = {
    "st.async": _decode_remote(_STORE),
    "red.async": _decode_remote(_REDUCE),
    "cp.reduce.async.bulk.shared::cluster": decode_bulk_reduce,
    "getctarank": decode_getctarank,
}
