"""Tensor copies of every rank and direction in PTX; the descriptor lies in global memory."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from hopperflash.emulator.errors import EmulationError, InvalidDescriptor, UnknownInstruction
from tests.support.ptx import Outcome, execute
from tests.support.tensor_maps import encode

RNG = np.random.default_rng(31)
SCHEDULES = ["eager", "lazy", "random"]
DTYPES: dict[str, Any] = {
    "u8": np.uint8, "u16": np.uint16, "u32": np.uint32, "s32": np.int32, "u64": np.uint64,
    "s64": np.int64, "f16": np.float16, "f32": np.float32, "f64": np.float64,
}  # fmt: skip
# Sizes, boxes and coordinates, innermost first; boxes reach over the edges.
RANKS = {
    1: ((100,), (64,), (50,)),
    2: ((40, 20), (16, 8), (32, -3)),
    3: ((24, 7, 5), (8, 4, 2), (-4, 5, 4)),
    4: ((16, 5, 4, 3), (8, 2, 3, 2), (8, 4, -1, 2)),
    5: ((16, 4, 3, 3, 2), (8, 2, 2, 2, 1), (0, 3, 2, 1, 1)),
}
ONE = """
    mov.u32 %r3, smem; setp.ne.u32 %p2, %r0, 0; @%p2 bra READY;
    mbarrier.init.shared.b64 [%r3], 1; fence.mbarrier_init.release.cluster;
READY:
    bar.sync 0;
"""
WAIT = """
LOOP:
    mbarrier.try_wait.parity.shared.b64 %p3, [%r3], 0; @!%p3 bra LOOP;
"""


def descriptor(array: np.ndarray, kind: str, box: tuple[int, ...], swizzle: int = 0) -> np.ndarray:
    """The tensor map of an array whose last axis is the innermost."""
    strides = array.strides[::-1][1:]
    raw = encode(array.ctypes.data, kind, array.shape[::-1], strides, box, swizzle)
    storage = np.zeros(192, np.uint8)
    start = -storage.ctypes.data % 64
    aligned = storage[start : start + 128]
    aligned[:] = np.frombuffer(raw, np.uint8)
    return aligned


def tensor(dims: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Random values in a 16-byte aligned array, rows padded to 16 bytes; `.base` owns them."""
    per = 16 // np.dtype(dtype).itemsize
    shape = dims[::-1]
    padded = (*shape[:-1], -(-shape[-1] // per) * per)
    count = int(np.prod(padded)) + per
    owner = RNG.integers(0, 60, count).astype(dtype)
    start = (-owner.ctypes.data % 16) // owner.itemsize
    return owner[start : start + count - per].reshape(padded)[..., : shape[-1]]


def window(array: np.ndarray, box: tuple[int, ...], at: tuple[int, ...]) -> list[Any]:
    """(index in the box, index in the array or None outside), outermost first."""
    found = []
    for index in itertools.product(*(range(extent) for extent in box[::-1])):
        where = tuple(i + c for i, c in zip(index, at[::-1], strict=True))
        inside = all(0 <= w < size for w, size in zip(where, array.shape, strict=True))
        found.append((index, where if inside else None))
    return found


def coordinates(at: tuple[int, ...]) -> tuple[str, str]:
    names = ", ".join(f"%r{40 + i}" for i in range(len(at)))
    moves = " ".join(f"mov.b32 %r{40 + i}, {value};" for i, value in enumerate(at))
    return moves, f"{{{names}}}"


def copy_out(nbytes: int) -> str:
    """Shared bytes from %r3+1024 to the first parameter."""
    return f"""
        mov.b32 %r6, %r0;
    COPY:
        setp.ge.u32 %p4, %r6, {nbytes // 4}; @%p4 bra COPIED;
        shl.b32 %r7, %r6, 2; add.s32 %r8, %r3, %r7; ld.shared.b32 %r9, [%r8+1024];
        cvt.u64.u32 %d5, %r7; add.s64 %d6, %d0, %d5; st.global.b32 [%d6], %r9;
        add.u32 %r6, %r6, 32; bra COPY;
    COPIED:
    """


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kind", ["u8", "f16", "f32", "u64"])
@pytest.mark.parametrize("rank", RANKS)
def test_loads(rank: int, kind: str, schedule: str) -> None:
    dims, box, at = RANKS[rank]
    box = (max(box[0], 16 // np.dtype(DTYPES[kind]).itemsize), *box[1:])
    source = tensor(dims, DTYPES[kind])
    out = np.zeros(box[::-1], DTYPES[kind])
    moves, where = coordinates(at)
    body = f"""
        {ONE} {moves} @%p2 bra WAITS;
        mbarrier.arrive.expect_tx.shared.b64 _, [%r3], {out.nbytes};
        cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes
            [%r3+1024], [%d1, {where}], [%r3];
    WAITS:
        {WAIT} {copy_out(out.nbytes)}
    """
    raw = descriptor(source, kind, box)
    outcome = execute(body, out, raw, source.base, schedule=schedule, seed=3)
    expected = np.zeros_like(out)
    for index, place in window(source, box, at):
        if place is not None:
            expected[index] = source[place]
    assert np.array_equal(out, expected)
    inside = sum(place is not None for _, place in window(source, box, at))
    counters = outcome.counters
    assert counters.tma_load_bytes == counters.unique_global_load_bytes == inside * out.itemsize
    assert outcome.hazards == []


def fill(nbytes: int) -> str:
    """Shared bytes at %r3+1024 from the third parameter."""
    return f"""
        mov.u32 %r3, smem; setp.ne.u32 %p2, %r0, 0; mov.b32 %r6, %r0;
    FILL:
        setp.ge.u32 %p4, %r6, {nbytes // 4}; @%p4 bra FILLED;
        shl.b32 %r7, %r6, 2; add.s32 %r8, %r3, %r7; cvt.u64.u32 %d5, %r7; add.s64 %d6, %d2, %d5;
        ld.global.b32 %r9, [%d6]; st.shared.b32 [%r8+1024], %r9; add.u32 %r6, %r6, 32; bra FILL;
    FILLED:
        fence.proxy.async.shared::cta; bar.sync 0;
    """


def store(
    target: np.ndarray, kind: str, update: np.ndarray, at: tuple[int, ...], opcode: str,
    schedule: str,
) -> Outcome:  # fmt: skip
    moves, where = coordinates(at)
    body = f"""
        {fill(update.nbytes)} {moves} @%p2 bra DONE;
        {opcode} [%d1, {where}], [%r3+1024];
        cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
    DONE:
    """
    raw = descriptor(target, kind, update.shape[::-1])
    outcome = execute(body, target.base, raw, update, schedule=schedule, seed=4)
    assert outcome.hazards == []
    return outcome


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("rank", RANKS)
def test_stores(rank: int, schedule: str) -> None:
    dims, box, at = RANKS[rank]
    target = tensor(dims, np.float16)
    update = RNG.integers(100, 200, box[::-1]).astype(np.float16)
    expected = target.copy()
    for index, place in window(target, box, at):
        if place is not None:
            expected[place] = update[index]
    opcode = f"cp.async.bulk.tensor.{rank}d.global.shared::cta.tile.bulk_group"
    store(target, "f16", update, at, opcode, schedule)
    assert np.array_equal(target, expected)


REDUCTIONS = [
    ("add", "u32"), ("add", "s32"), ("add", "u64"), ("add", "f16"), ("add", "f32"), ("add", "f64"),
    ("min", "s32"), ("max", "s64"), ("min", "f16"), ("and", "u32"), ("or", "u64"), ("xor", "s32"),
]  # fmt: skip


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("op", "kind"), REDUCTIONS)
def test_reductions(op: str, kind: str, schedule: str) -> None:
    dims, box, at = (20, 6), (8, 4), (16, 3)
    target = tensor(dims, DTYPES[kind])
    update = RNG.integers(0, 60, box[::-1]).astype(DTYPES[kind])
    fn = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and,
          "or": np.bitwise_or, "xor": np.bitwise_xor}[op]  # fmt: skip
    expected = target.copy()
    for index, place in window(target, box, at):
        if place is not None:
            expected[place] = fn(target[place], update[index])
    opcode = f"cp.reduce.async.bulk.tensor.2d.global.shared::cta.{op}.tile.bulk_group"
    counters = store(target, kind, update, at, opcode, schedule).counters
    assert np.array_equal(target, expected)
    assert counters.tma_reduce_bytes == counters.tma_store_bytes == 4 * 3 * target.itemsize


@pytest.mark.parametrize(("op", "kind"), [("min", "f32"), ("xor", "f16"), ("inc", "s32")])
def test_reductions_that_do_not_exist_are_refused(op: str, kind: str) -> None:
    target = tensor((16, 4), DTYPES[kind])
    update = np.zeros((4, 8), DTYPES[kind])
    opcode = f"cp.reduce.async.bulk.tensor.2d.global.shared::cta.{op}.tile.bulk_group"
    with pytest.raises(InvalidDescriptor, match=f"{op} on {kind}"):
        store(target, kind, update, (0, 0), opcode, "eager")


BULK_REDUCTIONS = [
    ("add.f32", np.float32), ("add.noftz.f16", np.float16), ("add.u32", np.uint32),
    ("add.s32", np.int32), ("add.u64", np.uint64), ("add.f64", np.float64),
    ("min.s32", np.int32), ("max.noftz.f16", np.float16), ("min.u64", np.uint64),
    ("and.b32", np.uint32), ("xor.b64", np.uint64),
]  # fmt: skip


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("op", "dtype"), BULK_REDUCTIONS)
def test_bulk_reductions(op: str, dtype: Any, schedule: str) -> None:
    count = 256 // np.dtype(dtype).itemsize
    target, update = (RNG.integers(0, 60, count).astype(dtype) for _ in range(2))
    name = op.split(".")[0]
    fn = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and,
          "xor": np.bitwise_xor}[name]  # fmt: skip
    expected = fn(target, update)
    body = f"""
        {fill(256)} @%p2 bra DONE;
        cp.reduce.async.bulk.global.shared::cta.bulk_group.{op} [%d0], [%r3+1024], 256;
        cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0;
    DONE:
    """
    outcome = execute(body, target, np.zeros(1, np.uint8), update, schedule=schedule)
    assert np.array_equal(target, expected)
    assert outcome.hazards == [] and outcome.counters.tma_reduce_bytes == 256


@pytest.mark.parametrize(("operation", "times"), [(".add.f32", 32), ("", 1)])
def test_a_whole_warp_reduces_by_every_lane_but_stores_once(operation: str, times: int) -> None:
    target, update = (RNG.integers(0, 60, 64).astype(np.float32) for _ in range(2))
    expected = update * times + (target if operation else 0)
    opcode = "cp.reduce.async.bulk" if operation else "cp.async.bulk"
    body = f"""
        {fill(256)}
        {opcode}.global.shared::cta.bulk_group{operation} [%d0], [%r3+1024], 256;
        cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
    """
    outcome = execute(body, target, np.zeros(1, np.uint8), update)
    assert np.array_equal(target, expected)
    assert outcome.counters.tma_stores == times


def test_bulk_reduction_of_bf16() -> None:
    def bits(values: np.ndarray) -> np.ndarray:
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)

    values = RNG.integers(0, 60, (2, 128))
    target, update = bits(values[0]), bits(values[1])
    body = f"""
        {fill(256)} @%p2 bra DONE;
        cp.reduce.async.bulk.global.shared::cta.bulk_group.add.noftz.bf16 [%d0], [%r3+1024], 256;
        cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
    DONE:
    """
    execute(body, target, np.zeros(1, np.uint8), update)
    assert np.array_equal(target, bits(values.sum(axis=0)))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_tensor_multicast(schedule: str) -> None:
    """CTA 1 loads for CTAs 0 and 2 of three; each waits at its own mbarrier."""
    source, out = tensor((32, 8), np.float16), np.zeros((3, 8, 32), np.float16)
    body = f"""
        {ONE} barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
        mov.u32 %r2, %cluster_ctarank; setp.eq.u32 %p5, %r2, 1; mov.b32 %r40, 0; mov.b32 %r41, 0;
        @%p2 bra ISSUED; @%p5 bra LOADS;
        mbarrier.arrive.expect_tx.shared.b64 _, [%r3], 512; bra ISSUED;
    LOADS:
        mov.b16 %h1, 5;
        cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes
            .multicast::cluster.L2::cache_hint [%r3+1024], [%d1, {{%r40, %r41}}], [%r3], %h1, %d1;
    ISSUED:
        @%p5 bra COPIED;
        {WAIT} mul.wide.u32 %d7, %r2, 512; add.s64 %d0, %d0, %d7; {copy_out(512)}
        barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    """.replace("bytes\n            .multicast", "bytes.multicast")
    outcome = execute(
        body, out, descriptor(source, "f16", (32, 8)), source, grid=3, cluster=3,
        schedule=schedule, seed=8,
    )  # fmt: skip
    assert np.array_equal(out[0], source) and np.array_equal(out[2], source)
    assert (out[1] == 0).all()
    assert outcome.counters.tma_load_bytes == source.size * 2
    assert outcome.hazards == []


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_edited_tensor_maps(schedule: str) -> None:
    """A map is copied to shared memory, pointed elsewhere, and published to global memory."""
    source, other = tensor((64, 16), np.float32), tensor((32, 12), np.float32)
    raw, edited = descriptor(source, "f32", (16, 4)), descriptor(source, "f32", (16, 4))
    edited[:] = 0
    out = np.zeros((4, 16), np.float32)
    moves, where = coordinates((24, 10))
    replace = "tensormap.replace.tile.{}.shared::cta.b1024.{} [%r3+512], {};"
    edits = "\n".join([
        replace.format("global_address", "b64", "%d4"),
        replace.format("global_dim", "b32", "0, 32"),
        replace.format("global_dim", "b32", "1, 12"),
        replace.format("global_stride", "b64", f"0, {other.strides[0]}"),
    ])  # fmt: skip
    body = f"""
        {ONE} {moves} add.s64 %d5, %d1, %d30; ld.global.b32 %r9, [%d5]; shl.b32 %r7, %r0, 2;
        add.s32 %r7, %r7, %r3; st.shared.b32 [%r7+512], %r9; bar.sync 0; @%p2 bra EDITED;
        {edits}
    EDITED:
        bar.sync 0;
        tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned
            [%d2], [%r3+512], 128;
        fence.proxy.tensormap::generic.acquire.gpu [%d2], 128; @%p2 bra WAITS;
        mbarrier.arrive.expect_tx.shared.b64 _, [%r3], 256;
        cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes
            [%r3+1024], [%d2, {where}], [%r3];
    WAITS:
        {WAIT} {copy_out(256)}
    """
    outcome = execute(body, out, raw, edited, source, other, schedule=schedule)
    expected = np.zeros_like(out)
    expected[:2, :8] = other[10:12, 24:32]
    assert np.array_equal(out, expected)
    assert outcome.hazards == []


@pytest.mark.parametrize(
    ("opcode", "error"),
    [
        ("cp.async.bulk.tensor.3d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes",
         UnknownInstruction),
        ("cp.async.bulk.tensor.2d.shared::cluster.global.tile::gather4.mbarrier::complete_tx::bytes",
         UnknownInstruction),
        ("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes",
         EmulationError),
    ],
)  # fmt: skip
def test_other_modes_and_ranks_are_refused(opcode: str, error: type[Exception]) -> None:
    source = tensor((32, 8), np.float16)
    body = f"{ONE} mov.b32 %r40, 0; {opcode} [%r3+1024], [%d1, {{%r40, %r40, %r40}}], [%r3];"
    with pytest.raises(error, match=r"bulk.tensor|coordinates"):
        execute(body, np.zeros(1, np.uint8), descriptor(source, "f16", (32, 8)), source)
