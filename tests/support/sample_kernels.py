"""Two small Hopper kernels that exercise the emulator: a TMA copy and a one-warpgroup GEMM."""

from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.utils import sm90

TILE_M = 64


class TmaCopy:
    """Copies a matrix tile by tile through shared memory, with TMA in both directions."""

    def __init__(self, tile: tuple[int, int], swizzle: str = "INTER") -> None:
        self.tile = tile
        self.atom_kind = getattr(warpgroup.SmemLayoutAtomKind, f"K_{swizzle}")

    @cute.jit
    def __call__(self, src: cute.Tensor, dst: cute.Tensor, stream: Any) -> None:
        atom = warpgroup.make_smem_layout_atom(self.atom_kind, src.element_type)
        layout = cute.tile_to_shape(atom, self.tile, (0, 1))
        load, tma_src = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(), src, layout, self.tile
        )
        store, tma_dst = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileS2GOp(), dst, layout, self.tile
        )
        grid = cute.ceil_div(src.shape, self.tile)
        self.kernel(load, tma_src, store, tma_dst, layout, src.element_type).launch(
            grid=(*grid, 1), block=(32, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        load: cute.CopyAtom,
        tma_src: cute.Tensor,
        store: cute.CopyAtom,
        tma_dst: cute.Tensor,
        layout: cute.ComposedLayout,
        dtype: cutlass.Constexpr[Any],
    ) -> None:
        row, column, _ = cute.arch.block_idx()
        smem = SmemAllocator()
        barrier = smem.allocate_array(cutlass.Int64, 1)
        staged = smem.allocate_tensor(dtype, layout.outer, 1024, swizzle=layout.inner)
        if cute.arch.thread_idx()[0] == 0:
            cute.arch.mbarrier_init(barrier, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        g_src = cute.local_tile(tma_src, self.tile, (row, column))
        g_dst = cute.local_tile(tma_dst, self.tile, (row, column))
        one = cute.make_layout(1)
        s_load, g_load = cpasync.tma_partition(
            load, 0, one, cute.group_modes(staged, 0, 2), cute.group_modes(g_src, 0, 2)
        )
        s_store, g_store = cpasync.tma_partition(
            store, 0, one, cute.group_modes(staged, 0, 2), cute.group_modes(g_dst, 0, 2)
        )
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, cute.size_in_bytes(dtype, layout))
        cute.copy(load, g_load, s_load, tma_bar_ptr=barrier)
        cute.arch.mbarrier_wait(barrier, 0)
        cute.copy(store, s_store, g_store)
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=True)


class SmallGemm:
    """C[m, n] = sum_k A[m, k] B[n, k] in float32, one warpgroup per 64-row tile."""

    def __init__(self, tile_n: int, tile_k: int, b_major: str = "K") -> None:
        self.tile_n = tile_n
        self.tile_k = tile_k
        self.b_mn_major = b_major == "MN"

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, stream: Any) -> None:
        dtype = a.element_type
        b_mode = OperandMajorMode.MN if self.b_mn_major else OperandMajorMode.K
        mma = sm90.make_trivial_tiled_mma(
            dtype,
            dtype,
            OperandMajorMode.K,
            b_mode,
            cutlass.Float32,
            (1, 1, 1),
            (TILE_M, self.tile_n),
        )
        row_major = cutlass.tensor_utils.LayoutEnum.ROW_MAJOR
        col_major = cutlass.tensor_utils.LayoutEnum.COL_MAJOR
        layout_a = cute.tile_to_shape(
            warpgroup.make_smem_layout_atom(
                sm90.get_smem_layout_atom(row_major, dtype, self.tile_k), dtype
            ),
            (TILE_M, self.tile_k),
            (0, 1),
        )
        kind_b = sm90.get_smem_layout_atom(
            col_major if self.b_mn_major else row_major,
            dtype,
            self.tile_n if self.b_mn_major else self.tile_k,
        )
        layout_b = cute.tile_to_shape(
            warpgroup.make_smem_layout_atom(kind_b, dtype),
            (self.tile_n, self.tile_k),
            (1, 0) if self.b_mn_major else (0, 1),
        )
        load = cpasync.CopyBulkTensorTileG2SOp()
        atom_a, tma_a = cpasync.make_tiled_tma_atom(load, a, layout_a, (TILE_M, self.tile_k))
        atom_b, tma_b = cpasync.make_tiled_tma_atom(load, b, layout_b, (self.tile_n, self.tile_k))
        grid = cute.ceil_div(c.shape, (TILE_M, self.tile_n))
        self.kernel(mma, (atom_a, tma_a), (atom_b, tma_b), c, layout_a, layout_b, dtype).launch(
            grid=(*grid, 1), block=(128, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        mma: cute.TiledMma,
        tma_a: tuple[cute.CopyAtom, cute.Tensor],
        tma_b: tuple[cute.CopyAtom, cute.Tensor],
        c: cute.Tensor,
        layout_a: cute.ComposedLayout,
        layout_b: cute.ComposedLayout,
        dtype: cutlass.Constexpr[Any],
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        row, column, _ = cute.arch.block_idx()
        atom_a, tensor_a = tma_a
        atom_b, tensor_b = tma_b
        smem = SmemAllocator()
        barrier = smem.allocate_array(cutlass.Int64, 1)
        s_a = smem.allocate_tensor(dtype, layout_a.outer, 1024, swizzle=layout_a.inner)
        s_b = smem.allocate_tensor(dtype, layout_b.outer, 1024, swizzle=layout_b.inner)
        if thread == 0:
            cute.arch.mbarrier_init(barrier, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        g_a = cute.local_tile(tensor_a, (TILE_M, self.tile_k), (row, None))
        g_b = cute.local_tile(tensor_b, (self.tile_n, self.tile_k), (column, None))
        one = cute.make_layout(1)
        s_a_tma, g_a_tma = cpasync.tma_partition(
            atom_a, 0, one, cute.group_modes(s_a, 0, 2), cute.group_modes(g_a, 0, 2)
        )
        s_b_tma, g_b_tma = cpasync.tma_partition(
            atom_b, 0, one, cute.group_modes(s_b, 0, 2), cute.group_modes(g_b, 0, 2)
        )
        threads = mma.get_slice(0)
        frag_a = mma.make_fragment_A(threads.partition_A(s_a))
        frag_b = mma.make_fragment_B(threads.partition_B(s_b))
        accumulator = cute.make_rmem_tensor(
            mma.partition_shape_C((TILE_M, self.tile_n)), cutlass.Float32
        )
        accumulator.fill(0.0)
        mma.set(warpgroup.Field.ACCUMULATE, True)
        tile_bytes = cute.size_in_bytes(dtype, layout_a) + cute.size_in_bytes(dtype, layout_b)
        for step in cutlass.range(cute.size(g_a, mode=[2]), unroll=1):
            if thread < 32:
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(barrier, tile_bytes)
                cute.copy(atom_a, g_a_tma[None, step], s_a_tma, tma_bar_ptr=barrier)
                cute.copy(atom_b, g_b_tma[None, step], s_b_tma, tma_bar_ptr=barrier)
            cute.arch.mbarrier_wait(barrier, step % 2)
            warpgroup.fence()
            cute.gemm(mma, accumulator, frag_a, frag_b, accumulator)
            warpgroup.commit_group()
            warpgroup.wait_group(0)
            cute.arch.sync_threads()

        tile_shape = (TILE_M, self.tile_n)
        tile_c = mma.get_slice(thread).partition_C(cute.local_tile(c, tile_shape, (row, column)))
        coords = cute.local_tile(cute.make_identity_tensor(c.shape), tile_shape, (row, column))
        tile_coords = mma.get_slice(thread).partition_C(coords)
        for i in cutlass.range(cute.size(accumulator), unroll_full=True):
            if cute.elem_less(tile_coords[i], c.shape):
                tile_c[i] = accumulator[i]


@dataclass(frozen=True)
class Scaling:
    """An argument with a tensor in it."""

    factors: cute.Tensor
    bias: cutlass.Float32


class ScaleRows:
    """x[i, j] = x[i, j] * factors[i] * gain + bias; takes its stream in the middle."""

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        stream: Any,
        scaling: Scaling,
        gain: cutlass.Float32 = 2.0,
        *,
        rows: cutlass.Int32,
    ) -> None:
        self.kernel(x, scaling.factors, scaling.bias, gain).launch(
            grid=(rows, 1, 1), block=(32, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        x: cute.Tensor,
        factors: cute.Tensor,
        bias: cutlass.Float32,
        gain: cutlass.Float32,
    ) -> None:
        row = cute.arch.block_idx()[0]
        for column in range(cute.arch.thread_idx()[0], x.shape[1], 32):
            x[row, column] = x[row, column] * factors[row] * gain + bias


def compile_kernel(
    host: Any, *tensors: Any, tvm_ffi: bool = True, keep: str = "", arch: str = "sm_90a"
) -> Any:
    """Compiles a sample and keeps its PTX; the stream is added here."""
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=tvm_ffi)
    kind = "--enable-tvm-ffi" if tvm_ffi else ""
    # Kernels share file names: a folder of its own keeps every kernel's PTX apart.
    with TemporaryDirectory() as folder:
        options = f"--gpu-arch {arch} --keep-ptx {keep} {kind} --dump-dir {folder}"
        return cute.compile(host, *tensors, stream, options=options)


def fake_matrix(dtype: Any, leading: int = 1) -> Any:
    """A device matrix of unknown extents whose mode `leading` is contiguous."""
    shape = [cute.sym_int() for _ in range(2)]
    stride: list[Any] = [cute.sym_int64(divisibility=8)] * 2
    stride[leading] = 1
    return cute.runtime.make_fake_tensor(dtype, shape, stride, assumed_align=16)
