"""Small CuTe DSL kernels whose right answer is known from torch: copies, clusters, sm_80."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("cutlass")

import cutlass
import cutlass.cute as cute
import torch

from hopperflash.emulator import AddressError, launch
from tests.support.conformance_kernels import AmpereGemm, BoxCopy, MulticastGemm, RaggedCopy
from tests.support.sample_kernels import SmallGemm, compile_kernel, fake_matrix

pytestmark = pytest.mark.emulated

SCHEDULES = ["eager", "lazy", "random"]


def fake_tensor(dtype: Any, rank: int) -> Any:
    """A device tensor of unknown extents, innermost mode first."""
    shape = [cute.sym_int() for _ in range(rank)]
    stride = [1, *(cute.sym_int64(divisibility=8) for _ in range(rank - 1))]
    return cute.runtime.make_fake_tensor(dtype, shape, stride, assumed_align=16)


def integers(*shape: int, seed: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    """Small integers: sums of their products are exact in every accumulator."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=generator).to(dtype)


# Extents innermost first, with boxes that reach over the edges.
BOXES = {
    1: ((200,), (64,)),
    2: ((72, 20), (32, 16)),
    3: ((40, 10, 6), (16, 8, 4)),
    4: ((24, 6, 5, 3), (8, 4, 2, 2)),
    5: ((16, 5, 3, 3, 2), (8, 2, 2, 2, 2)),
}


@pytest.mark.parametrize("rank", BOXES)
def test_tensor_copies_of_every_rank(rank: int) -> None:
    extents, box = BOXES[rank]
    copy = compile_kernel(BoxCopy(box), *(fake_tensor(cutlass.Float16, rank) for _ in range(2)))
    src = integers(*extents[::-1], seed=1)
    for schedule in SCHEDULES:
        dst = torch.full_like(src, torch.nan)
        # CuTe's first mode is the innermost.
        modes = tuple(range(rank))[::-1]
        run = launch(copy, src.permute(modes), dst.permute(modes), schedule=schedule)
        assert torch.equal(src, dst)
        assert run.hazards == []
        counters = run.counters
        assert counters["tma_load_bytes"] == counters["tma_store_bytes"] == src.nbytes
        assert counters["unique_global_load_bytes"] == src.nbytes


def test_tensor_reduction_adds() -> None:
    add = compile_kernel(
        BoxCopy((32, 16), reduce=True), *(fake_tensor(cutlass.Float32, 2) for _ in range(2))
    )
    src, dst = (integers(20, 72, seed=s, dtype=torch.float32) for s in (2, 3))
    expected = src + dst
    run = launch(add, src.T, dst.T)
    assert torch.equal(dst, expected)
    assert run.counters["tma_reduce_bytes"] == dst.nbytes


def ragged_copy(store: str) -> Any:
    def packed() -> Any:
        strides = (*(cute.sym_int64(divisibility=8) for _ in range(2)), 1)
        shape = (cute.sym_int(), cute.sym_int(), RaggedCopy.head_dim)
        return cute.runtime.make_fake_tensor(cutlass.BFloat16, shape, strides, assumed_align=16)

    starts, lengths = (
        cute.runtime.make_fake_tensor(cutlass.Int32, (cute.sym_int(),), (1,)) for _ in range(2)
    )
    return compile_kernel(RaggedCopy(store), packed(), packed(), starts, lengths)


def lengths_of(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("store", ["ragged", "reduce"])
def test_ragged_stores_end_with_their_sequence(store: str) -> None:
    copy = ragged_copy(store)
    src = integers(100, 3, 64, seed=11, dtype=torch.bfloat16)
    starts, lengths = lengths_of(0, 33, 40, 99), lengths_of(33, 5, 50, 1)
    inside = torch.cat([torch.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)])
    before = integers(100, 3, 64, seed=12, dtype=torch.bfloat16)
    expected = before.clone()
    expected[inside] = src[inside] + (before[inside] if store == "reduce" else 0)
    for schedule in SCHEDULES:
        dst = before.clone()
        run = launch(copy, src, dst, starts, lengths, schedule=schedule)
        assert torch.equal(dst, expected)
        assert run.hazards == []
        moved = len(inside) * src[0].nbytes
        assert run.counters["tma_load_bytes"] == run.counters["tma_store_bytes"] == moved


def test_ragged_loads_are_zero_after_their_sequence() -> None:
    src = integers(64, 2, 64, seed=13, dtype=torch.bfloat16) + 8
    dst = torch.ones_like(src)
    launch(ragged_copy("plain"), src, dst, lengths_of(8), lengths_of(43))
    assert torch.equal(dst[8:51], src[8:51])
    assert dst[51:].eq(0).all() and dst[:8].eq(1).all()


def test_ragged_copies_outside_of_memory_are_refused() -> None:
    """The map reaches over 2**64 bytes: only rows that are touched must exist."""
    src, copy = torch.zeros(64, 1, 64, dtype=torch.bfloat16), ragged_copy("ragged")
    launch(copy, src, src.clone(), lengths_of(32), lengths_of(32))
    with pytest.raises(AddressError, match="outside the registered memory"):
        launch(copy, src, src.clone(), lengths_of(32), lengths_of(33))


@pytest.mark.parametrize("cluster", [2, 4])
def test_multicast_gemm(cluster: int) -> None:
    fakes = [fake_matrix(t) for t in (cutlass.BFloat16, cutlass.BFloat16, cutlass.Float32)]
    gemm = compile_kernel(MulticastGemm(cluster), *fakes)
    a = integers(128, 192, seed=4, dtype=torch.bfloat16)
    b = integers(128, 192, seed=5, dtype=torch.bfloat16)
    for schedule in SCHEDULES:
        c = torch.full((128, 128), torch.nan)
        run = launch(gemm, a, b, c, schedule=schedule, seed=7)
        assert torch.equal(c, a.float() @ b.float().T)
        assert run.hazards == []
        assert run.launches[0].cluster == (1, cluster, 1)
        # A tile reaches the CTAs of a cluster in one load of each byte.
        loads_of_a = a.nbytes * 4 // cluster
        assert run.counters["tma_load_bytes"] == loads_of_a + b.nbytes * 2


def test_half_accumulators() -> None:
    fakes = [fake_matrix(t) for t in (cutlass.Float16, cutlass.Float16, cutlass.Float32)]
    gemm = compile_kernel(MulticastGemm(2, cutlass.Float16), *fakes)
    a, b, c = integers(64, 128, seed=4), integers(64, 128, seed=5), torch.zeros(64, 64)
    run = launch(gemm, a, b, c)
    assert torch.equal(c, a.float() @ b.float().T)
    assert run.counters["wgmma:m64n32k16.f16.f16.f16"] == 2 * 2 * 4


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_gemm_of_8_bit_floats(dtype: torch.dtype) -> None:
    kind = {torch.float8_e4m3fn: cutlass.Float8E4M3FN, torch.float8_e5m2: cutlass.Float8E5M2}
    fakes = [fake_matrix(kind[dtype]), fake_matrix(kind[dtype]), fake_matrix(cutlass.Float32)]
    gemm = compile_kernel(SmallGemm(32, 128), *fakes)
    a, b = integers(64, 256, seed=6, dtype=dtype), integers(32, 256, seed=7, dtype=dtype)
    c = torch.zeros(64, 32)
    run = launch(gemm, a, b, c)
    assert torch.equal(c, a.float() @ b.float().T)
    assert run.counters["wgmma_flops"] == 2 * 64 * 32 * 256


@pytest.mark.parametrize("target", ["sm_80", "sm_86", "sm_89"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_ampere_gemm(dtype: torch.dtype, target: str) -> None:
    kind = {torch.float16: cutlass.Float16, torch.bfloat16: cutlass.BFloat16}[dtype]
    fakes = [fake_matrix(kind), fake_matrix(kind), fake_matrix(cutlass.Float32)]
    gemm = compile_kernel(AmpereGemm(), *fakes, arch=target)
    a, b = integers(128, 192, seed=8, dtype=dtype), integers(64, 192, seed=9, dtype=dtype)
    for schedule in SCHEDULES:
        c = torch.full((128, 64), torch.nan)
        run = launch(gemm, a, b, c, schedule=schedule)
        assert torch.equal(c, a.float() @ b.float().T)
        assert run.hazards == []
        counters = run.counters
        assert counters["mma_flops"] == 2 * 128 * 64 * 192
        assert counters["op:ldmatrix"] > 0 and counters["shared_bank_conflicts"] == 0
        assert counters["global_load_bytes"] == a.nbytes + 2 * b.nbytes
