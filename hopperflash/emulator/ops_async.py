"""Async-proxy opcodes: wgmma, TMA and bulk copies, their groups, and tensor-map edits."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .bulk_loads import BulkLoad, TensorLoad, targets
from .bulk_stores import BulkStore, TensorStore
from .decode import Effect, Op, RowOf, effect, unknown
from .errors import BarrierError
from .memory import CLUSTER_SHIFT
from .operands import (
    address_reader,
    distinct_lanes,
    every_lane,
    lane_reader,
    one_lane_per_warp,
    reader,
    scalar_at,
)
from .ptx_ir import Immediate, Instruction, Vector
from .tensor_map import decode as decode_tensor_map
from .wgmma import WgmmaShape
from .wgmma_queue import WgmmaOp, WgmmaQueue, complete

_TENSOR_LOAD = re.compile(
    r"cp\.async\.bulk\.tensor\.[1-5]d\.shared::(cta|cluster)\.global(\.tile)?"
    r"\.mbarrier::complete_tx::bytes(\.multicast::cluster)?(\.L2::cache_hint)?$"
)
_TENSOR_STORE = re.compile(
    r"cp\.(reduce\.)?async\.bulk\.tensor\.[1-5]d\.global\.shared::cta"
    r"(?:\.(add|min|max|and|or|xor|inc|dec))?(\.tile)?\.bulk_group(\.L2::cache_hint)?$"
)
_BULK_LOAD = re.compile(
    r"cp\.async\.bulk\.shared::(cta|cluster)\.(global|shared::cta)"
    r"\.mbarrier::complete_tx::bytes(\.multicast::cluster)?(\.L2::cache_hint)?$"
)
_BULK_STORE = re.compile(
    r"cp\.(reduce\.)?async\.bulk\.global\.shared::cta\.bulk_group(\.L2::cache_hint)?"
    r"(?:\.(add|min|max|and|or|xor|inc|dec)(\.noftz)?\.(\w+))?$"
)


# The types of each bulk reduction into global memory.
_REDUCED = {
    "add": ("f16", "bf16", "f32", "f64", "u32", "s32", "u64"),
    **dict.fromkeys(("min", "max"), ("f16", "bf16", "u32", "s32", "u64", "s64")),
    **dict.fromkeys(("and", "or", "xor"), ("b32", "b64")),
    **dict.fromkeys(("inc", "dec"), ("u32",)),
}


def decode_tensor_load(ins: Instruction) -> Op:
    match = _TENSOR_LOAD.match(ins.opcode)
    if match is None:
        raise unknown(ins)
    dst, source, barrier, *rest = ins.operands
    mask_operand = rest[0] if match[3] else None

    def make(row: RowOf) -> Effect:
        to, signal, tensor = (address_reader(a, row) for a in (dst, barrier, source))
        coordinates = [reader(c, "i", row) for c in source.coordinates]
        ranks = reader(mask_operand, "h", row) if mask_operand is not None else None

        def run(g: Any, m: Any) -> None:
            for warp, lane in every_lane(m, g):
                tensor_map = decode_tensor_map(g.cta.tensor_map_bytes(int(tensor(g)[lane])))
                coords = [scalar_at(c(g), lane) for c in coordinates]
                mask = None if ranks is None else scalar_at(ranks(g), lane)
                where = targets(g.cta, int(to(g)[lane]), int(signal(g)[lane]), mask)
                TensorLoad(g.cta, ins, where, tensor_map, coords).submit(warp)

        return run

    return effect(ins, make, reads=(dst, source, barrier, *rest))


def decode_tensor_store(ins: Instruction) -> Op:
    match = _TENSOR_STORE.match(ins.opcode)
    if match is None or bool(match[1]) != bool(match[2]):
        raise unknown(ins)
    target, source, *rest = ins.operands
    operation = match[2]

    def make(row: RowOf) -> Effect:
        tensor, frm = address_reader(target, row), address_reader(source, row)
        coordinates = [reader(c, "i", row) for c in target.coordinates]

        def run(g: Any, m: Any) -> None:
            operands = (frm(g), tensor(g), *(c(g) for c in coordinates))
            issuing = every_lane(m, g) if operation else distinct_lanes(m, g, *operands)
            for warp, lane in issuing:
                tensor_map = decode_tensor_map(g.cta.tensor_map_bytes(int(tensor(g)[lane])))
                coords = [scalar_at(c(g), lane) for c in coordinates]
                store = TensorStore(
                    g.cta, warp, int(frm(g)[lane]), ins, tensor_map, coords, operation
                )
                g.cta.machine.counters.tma_stores += 1
                g.cta.bulk_groups(warp).add(store)

        return run

    return effect(ins, make, reads=(target, source, *rest))


def decode_bulk_load(ins: Instruction) -> Op:
    match = _BULK_LOAD.match(ins.opcode)
    if match is None:
        raise unknown(ins)
    dst, source, size, barrier, *rest = ins.operands
    mask_operand = rest[0] if match[3] else None
    from_shared = match[2] != "global"

    def make(row: RowOf) -> Effect:
        to, frm, signal = (address_reader(a, row) for a in (dst, source, barrier))
        read_size = reader(size, "u", row)
        ranks = reader(mask_operand, "h", row) if mask_operand is not None else None

        def run(g: Any, m: Any) -> None:
            for warp, lane in every_lane(m, g):
                mask = None if ranks is None else scalar_at(ranks(g), lane)
                where = targets(g.cta, int(to(g)[lane]), int(signal(g)[lane]), mask)
                nbytes, start = scalar_at(read_size(g), lane), int(frm(g)[lane])
                BulkLoad(g.cta, ins, where, start, nbytes, from_shared).submit(warp)

        return run

    return effect(ins, make, reads=(dst, source, size, barrier, *rest))


def decode_bulk_store(ins: Instruction) -> Op:
    match = _BULK_STORE.match(ins.opcode)
    if match is None or bool(match[1]) != bool(match[3]):
        raise unknown(ins)
    dst, source, size, *rest = ins.operands
    operation, kind = match[3], match[5]
    if operation is not None and kind not in _REDUCED[operation]:
        raise unknown(ins, f"type {kind}")

    def make(row: RowOf) -> Effect:
        to, frm, read_size = (
            address_reader(dst, row),
            address_reader(source, row),
            reader(size, "u", row),
        )

        def run(g: Any, m: Any) -> None:
            operands = (to(g), frm(g), read_size(g))
            issuing = every_lane(m, g) if operation else distinct_lanes(m, g, *operands)
            for warp, lane in issuing:
                store = BulkStore(
                    g.cta, warp, int(frm(g)[lane]), ins, int(to(g)[lane]),
                    scalar_at(read_size(g), lane), operation, kind,
                )  # fmt: skip
                g.cta.machine.counters.tma_stores += 1
                g.cta.bulk_groups(warp).add(store)

        return run

    return effect(ins, make, reads=(dst, source, size, *rest))


def _per_warp(action: Callable[[Any, int], None]) -> Callable[[Instruction], Op]:
    """An operation on one warp's groups; its literal operand is passed on."""

    def decode(ins: Instruction) -> Op:
        count = ins.operands[0].value if ins.operands else 0

        def run(g: Any, m: Any) -> None:
            for warp, _ in one_lane_per_warp(m, g):
                action((g.cta, warp), count)

        return effect(ins, lambda row: run)

    return decode


def decode_copy_arrive(ins: Instruction) -> Op:
    """cp.async.mbarrier.arrive: an arrival once earlier cp.async of the thread are done."""
    if not re.match(r"cp\.async\.mbarrier\.arrive(\.noinc)?(\.shared(::cta)?)?\.b64$", ins.opcode):
        raise unknown(ins)
    (address,) = ins.operands
    counted = "noinc" in ins.opcode

    def make(row: RowOf) -> Effect:
        at = address_reader(address, row)

        def run(g: Any, m: Any) -> None:
            addrs = at(g)
            for lane in np.nonzero(np.ones(g.n, bool) if m is None else m)[0]:
                copies = g.cta.copy_groups(int(lane) + g.lo >> 5)
                copies.arrive(g.cta.mbarrier(int(addrs[lane])), counted)

        return run

    return effect(ins, make, reads=(address,))


def decode_mapa(ins: Instruction) -> Op:
    """mapa.shared::cluster.u32: the address of a variable in another CTA of the cluster."""
    if ins.opcode not in ("mapa.shared::cluster.u32", "mapa.u64", "mapa.shared::cluster.u64"):
        raise unknown(ins)
    dst, source, rank = ins.operands
    view = "q" if ins.opcode.endswith("64") else "u"

    def make(row: RowOf) -> Effect:
        read, read_rank, target = reader(source, view, row), reader(rank, "u", row), row(dst)
        local = (1 << CLUSTER_SHIFT) - 1

        def run(g: Any, m: Any) -> None:
            address = np.asarray(read(g)).astype(np.int64) & local
            mapped = address | (np.asarray(read_rank(g)).astype(np.int64) + 1) << CLUSTER_SHIFT
            np.copyto(g.rows[view][target], mapped, "unsafe", True if m is None else m)

        return run

    return effect(ins, make, writes=(dst,), reads=(source, rank), ordered=False)


_WGMMA_MODS = re.compile(
    r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k\d+\.(f32|f16|s32)\.\w+\.\w+(\.satfinite)?$"
)


@lru_cache(maxsize=4096)
def _accumulator_rows(rows: tuple[int, ...]) -> tuple[NDArray[np.int64], int]:
    """The rows as an array and as a bit mask; operations on one accumulator share them."""
    return np.array(rows), sum(1 << r for r in rows)


def _rows_index(rows: list[int]) -> Any:
    if rows == list(range(rows[0], rows[0] + len(rows))):
        return slice(rows[0], rows[0] + len(rows))
    return np.array(rows)


def decode_wgmma(ins: Instruction) -> Op:
    """wgmma.mma_async: D, A (descriptor or registers), B, scale-d, scales, transposes."""
    if not _WGMMA_MODS.match(ins.opcode):
        raise unknown(ins)
    shape = WgmmaShape.parse(ins.opcode)
    d, a, b, scale_d, *tail = ins.operands
    if not all(isinstance(t, Immediate) for t in tail):
        raise unknown(ins, "scales and transposes must be literals")
    from_registers = isinstance(a, Vector)
    if len(d.items) != shape.registers or (from_registers and len(a.items) != 4):
        raise unknown(ins, f"{len(d.items)} accumulator registers, not {shape.registers}")
    values = [t.value for t in tail]
    scale_a, scale_b = values[:2] if len(values) >= 2 else (1, 1)
    transposes = values[2:]
    a_major = bool(transposes[0]) if len(transposes) == 2 else False
    b_major = bool(transposes[-1]) if transposes else False
    if scale_a not in (1, -1) or scale_b not in (1, -1):
        raise unknown(ins, "imm-scale must be 1 or -1")

    def make(row: RowOf) -> Effect:
        d_rows, d_mask = _accumulator_rows(tuple(row(r) for r in d.items))
        a_rows = _rows_index([row(r) for r in a.items]) if from_registers else None
        a_mask = sum(1 << row(r) for r in a.items) if from_registers else 0
        read_a = None if from_registers else lane_reader(a, "q", row)
        read_b = lane_reader(b, "q", row)
        read_scale = lane_reader(scale_d, "p", row)

        def run(g: Any, m: Any) -> None:
            if m is not None or g.lo % 128 or g.n % 128:
                raise BarrierError(
                    f"wgmma by threads {g.lo}..{g.hi - 1}: it takes whole warpgroups, "
                    "four warps from a multiple of four on"
                )
            for start in range(0, g.n, 128):
                op = WgmmaOp(
                    ins, shape, d_rows, d_mask, a_mask,
                    overwrite=not read_scale(g, start),
                    a_registers=None if a_rows is None
                    else g.U[a_rows, start : start + 128].copy(),
                    a_descriptor=0 if read_a is None else read_a(g, start),
                    b_descriptor=read_b(g, start),
                    negate=scale_a * scale_b < 0, a_mn_major=a_major, b_mn_major=b_major,
                )  # fmt: skip
                g.cta.wgmma_queue((g.lo + start) // 128).issue(op)

        return run

    fragments = tuple(a.items) if from_registers else ()
    scale = () if isinstance(scale_d, Immediate) else (scale_d,)
    return effect(
        ins, make, writes=(d,), reads=(d, a, b, *scale), collective="warpgroup",
        accumulators=tuple(d.items), fragments=fragments,
    )  # fmt: skip


def _queues(g: Any) -> list[WgmmaQueue]:
    """Those of a gang's warpgroups."""
    return [g.cta.wgmma_queue(group) for group in range(g.lo // 128, (g.hi + 127) // 128)]


def _wgmma_commit(ins: Instruction) -> Op:
    def run(g: Any, m: Any) -> None:
        queues = _queues(g)
        for queue in queues:
            queue.commit()
        work = g.cta.machine.async_work
        if work.schedule == "eager":
            complete(queues, [queue.committed() for queue in queues])
            return
        for queue in queues:
            work.start(queue.complete_early)

    return effect(ins, lambda row: run, collective="warpgroup")


def _wgmma_wait(ins: Instruction) -> Op:
    (count,) = ins.operands

    def run(g: Any, m: Any) -> None:
        queues = _queues(g)
        done = [queue.take(count.value) for queue in queues]
        complete(queues, done)
        for queue, ops in zip(queues, done, strict=True):
            queue.waited(ops)

    return effect(ins, lambda row: run, collective="warpgroup", ends=True)


def _wgmma_fence(ins: Instruction) -> Op:
    return effect(ins, lambda row: lambda g, m: None, collective="warpgroup")


def decode_nothing(ins: Instruction) -> Op:
    return effect(ins, lambda row: lambda g, m: None, ordered=False)


def _bulk_wait(ins: Instruction) -> Op:
    count, reads_only = ins.operands[0].value, ins.parts[-1] == "read"

    def run(g: Any, m: Any) -> None:
        for warp, _ in one_lane_per_warp(m, g):
            g.cta.bulk_groups(warp).wait(count, reads_only)

    return effect(ins, lambda row: run)


# The longest matching prefix of the opcode decides.
ASYNC_OPS: dict[str, Callable[[Instruction], Op]] = {
    "cp.async.bulk.tensor": lambda ins: (
        decode_tensor_store(ins) if ".bulk_group" in ins.opcode else decode_tensor_load(ins)
    ),
    "cp.reduce.async.bulk.tensor": decode_tensor_store,
    "cp.reduce.async.bulk": decode_bulk_store,
    "cp.async.bulk": lambda ins: (
        decode_bulk_store(ins) if ".bulk_group" in ins.opcode else decode_bulk_load(ins)
    ),
    "cp.async.bulk.prefetch": decode_nothing,
    "cp.async.bulk.commit_group": _per_warp(lambda w, _: w[0].bulk_groups(w[1]).commit()),
    "cp.async.bulk.wait_group": _bulk_wait,
    "cp.async.commit_group": _per_warp(lambda w, _: w[0].copy_groups(w[1]).commit()),
    "cp.async.wait_group": _per_warp(lambda w, n: w[0].copy_groups(w[1]).wait(n)),
    "cp.async.wait_all": _per_warp(lambda w, _: w[0].copy_groups(w[1]).wait_all()),
    "cp.async.mbarrier": decode_copy_arrive,
    "mapa": decode_mapa,
    "wgmma.mma_async": decode_wgmma,
    "wgmma.commit_group": _wgmma_commit,
    "wgmma.wait_group": _wgmma_wait,
    "wgmma.fence": _wgmma_fence,
    "prefetch.tensormap": decode_nothing,
}
