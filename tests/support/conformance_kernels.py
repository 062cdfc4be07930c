"""Small CuTe DSL kernels, one for each family of instructions that the emulator must get right."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.utils import sm90


class BoxCopy:
    """Copies a tensor of rank 1 to 5, one box by one CTA, with TMA in both directions."""

    def __init__(self, box: tuple[int, ...], reduce: bool = False) -> None:
        self.box = box
        self.reduce = reduce

    @cute.jit
    def __call__(self, src: cute.Tensor, dst: cute.Tensor, stream: Any) -> None:
        layout = cute.make_layout(self.box)
        load, tma_src = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(), src, layout, self.box
        )
        op = cpasync.CopyBulkTensorTileS2GOp()
        if cutlass.const_expr(self.reduce):
            op = cpasync.CopyReduceBulkTensorTileS2GOp(cute.ReductionKind.ADD)
        store, tma_dst = cpasync.make_tiled_tma_atom(op, dst, layout, self.box)
        boxes = cute.ceil_div(src.shape, self.box)
        self.kernel(
            load, tma_src, store, tma_dst, layout, cute.make_layout(boxes), src.element_type
        ).launch(grid=(cute.size(boxes), 1, 1), block=(32, 1, 1), stream=stream)

    @cute.kernel
    def kernel(
        self,
        load: cute.CopyAtom,
        tma_src: cute.Tensor,
        store: cute.CopyAtom,
        tma_dst: cute.Tensor,
        layout: cute.Layout,
        boxes: cute.Layout,
        dtype: cutlass.Constexpr[Any],
    ) -> None:
        at = boxes.get_hier_coord(cute.arch.block_idx()[0])
        smem = SmemAllocator()
        barrier = smem.allocate_array(cutlass.Int64, 1)
        staged = smem.allocate_tensor(dtype, layout, 1024)
        if cute.arch.thread_idx()[0] == 0:
            cute.arch.mbarrier_init(barrier, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        rank = len(self.box)
        one = cute.make_layout(1)
        s_load, g_load = cpasync.tma_partition(
            load, 0, one, cute.group_modes(staged, 0, rank),
            cute.group_modes(cute.local_tile(tma_src, self.box, at), 0, rank),
        )  # fmt: skip
        s_store, g_store = cpasync.tma_partition(
            store, 0, one, cute.group_modes(staged, 0, rank),
            cute.group_modes(cute.local_tile(tma_dst, self.box, at), 0, rank),
        )  # fmt: skip
        with cute.arch.elect_one():
            nbytes = cute.size_in_bytes(dtype, layout)
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, nbytes)
        cute.copy(load, g_load, s_load, tma_bar_ptr=barrier)
        cute.arch.mbarrier_wait(barrier, 0)
        cute.copy(store, s_store, g_store)
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=True)


class MulticastGemm:
    """C = A B^T with clusters of CTAs along N: each loads a part of A's tile for all of them."""

    tile_m, tile_n, tile_k = 64, 32, 64

    def __init__(self, cluster: int, accumulator: Any = cutlass.Float32) -> None:
        self.cluster = cluster
        self.accumulator = accumulator

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, stream: Any) -> None:
        dtype = a.element_type
        mma = sm90.make_trivial_tiled_mma(
            dtype, dtype, OperandMajorMode.K, OperandMajorMode.K, self.accumulator, (1, 1, 1),
            (self.tile_m, self.tile_n),
        )  # fmt: skip
        row_major = cutlass.tensor_utils.LayoutEnum.ROW_MAJOR
        kind = sm90.get_smem_layout_atom(row_major, dtype, self.tile_k)
        atom = warpgroup.make_smem_layout_atom(kind, dtype)
        layout_a = cute.tile_to_shape(atom, (self.tile_m, self.tile_k), (0, 1))
        layout_b = cute.tile_to_shape(atom, (self.tile_n, self.tile_k), (0, 1))
        tma_a = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SMulticastOp(), a, layout_a, (self.tile_m, self.tile_k),
            num_multicast=self.cluster,
        )  # fmt: skip
        tma_b = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(), b, layout_b, (self.tile_n, self.tile_k)
        )
        grid = cute.ceil_div(c.shape, (self.tile_m, self.tile_n))
        self.kernel(
            mma, (tma_a[0], tma_a[1]), (tma_b[0], tma_b[1]), c, layout_a, layout_b, dtype
        ).launch(
            grid=(*grid, 1), block=(128, 1, 1), cluster=(1, self.cluster, 1), stream=stream
        )  # fmt: skip

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
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        smem = SmemAllocator()
        barrier = smem.allocate_array(cutlass.Int64, 1)
        s_a = smem.allocate_tensor(dtype, layout_a.outer, 1024, swizzle=layout_a.inner)
        s_b = smem.allocate_tensor(dtype, layout_b.outer, 1024, swizzle=layout_b.inner)
        if thread == 0:
            cute.arch.mbarrier_init(barrier, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

        g_a = cute.local_tile(tma_a[1], (self.tile_m, self.tile_k), (row, None))
        g_b = cute.local_tile(tma_b[1], (self.tile_n, self.tile_k), (column, None))
        s_a_tma, g_a_tma = cpasync.tma_partition(
            tma_a[0], rank, cute.make_layout(self.cluster), cute.group_modes(s_a, 0, 2),
            cute.group_modes(g_a, 0, 2),
        )  # fmt: skip
        s_b_tma, g_b_tma = cpasync.tma_partition(
            tma_b[0], 0, cute.make_layout(1), cute.group_modes(s_b, 0, 2),
            cute.group_modes(g_b, 0, 2),
        )  # fmt: skip
        threads = mma.get_slice(0)
        frag_a = mma.make_fragment_A(threads.partition_A(s_a))
        frag_b = mma.make_fragment_B(threads.partition_B(s_b))
        shape = mma.partition_shape_C((self.tile_m, self.tile_n))
        accumulator = cute.make_rmem_tensor(shape, self.accumulator)
        accumulator.fill(0.0)
        mma.set(warpgroup.Field.ACCUMULATE, True)
        tile_bytes = cute.size_in_bytes(dtype, layout_a) + cute.size_in_bytes(dtype, layout_b)
        everyone = cutlass.Int16((1 << self.cluster) - 1)
        for step in cutlass.range(cute.size(g_a, mode=[2]), unroll=1):
            if thread == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, tile_bytes)
            # No CTA may write into another before that one expects the bytes.
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
            if thread < 32:
                cute.copy(
                    tma_a[0], g_a_tma[None, step], s_a_tma, tma_bar_ptr=barrier,
                    mcast_mask=everyone,
                )  # fmt: skip
                cute.copy(tma_b[0], g_b_tma[None, step], s_b_tma, tma_bar_ptr=barrier)
            cute.arch.mbarrier_wait(barrier, step % 2)
            warpgroup.fence()
            cute.gemm(mma, accumulator, frag_a, frag_b, accumulator)
            warpgroup.commit_group()
            warpgroup.wait_group(0)
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

        tile_shape = (self.tile_m, self.tile_n)
        tile_c = mma.get_slice(thread).partition_C(cute.local_tile(c, tile_shape, (row, column)))
        for i in cutlass.range(cute.size(accumulator), unroll_full=True):
            tile_c[i] = accumulator[i].to(cutlass.Float32)


class AmpereGemm:
    """C = A B^T with cp.async, ldmatrix and mma.sync: 64 x 64 tiles by two warps."""

    tile, threads = 64, 64

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, stream: Any) -> None:
        dtype = a.element_type
        op = warp.MmaF16BF16Op(dtype, cutlass.Float32, (16, 8, 16))
        mma = cute.make_tiled_mma(op, (2, 1, 1), permutation_mnk=(32, 16, 16))
        atom = cute.make_composed_layout(
            cute.make_swizzle(3, 3, 3), 0, cute.make_layout((8, 64), stride=(64, 1))
        )
        layout = cute.tile_to_shape(atom, (self.tile, self.tile), (0, 1))
        load = cute.make_copy_atom(
            cpasync.CopyG2SOp(cache_mode=cute.nvgpu.LoadCacheMode.GLOBAL), dtype,
            num_bits_per_copy=128,
        )  # fmt: skip
        tiled_load = cute.make_tiled_copy_tv(
            load, cute.make_layout((8, 8), stride=(8, 1)), cute.make_layout((1, 8))
        )
        grid = cute.ceil_div(c.shape, (self.tile, self.tile))
        self.kernel(mma, tiled_load, a, b, c, layout, dtype).launch(
            grid=(*grid, 1), block=(self.threads, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        mma: cute.TiledMma,
        tiled_load: cute.TiledCopy,
        a: cute.Tensor,
        b: cute.Tensor,
        c: cute.Tensor,
        layout: cute.ComposedLayout,
        dtype: cutlass.Constexpr[Any],
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        row, column, _ = cute.arch.block_idx()
        smem = SmemAllocator()
        s_a = smem.allocate_tensor(dtype, layout, 128)
        s_b = smem.allocate_tensor(dtype, layout, 128)
        g_a = cute.local_tile(a, (self.tile, self.tile), (row, None))
        g_b = cute.local_tile(b, (self.tile, self.tile), (column, None))
        loader = tiled_load.get_slice(thread)
        from_a, to_a = loader.partition_S(g_a), loader.partition_D(s_a)
        from_b, to_b = loader.partition_S(g_b), loader.partition_D(s_b)

        threads = mma.get_slice(thread)
        r_a = mma.make_fragment_A(threads.partition_A(s_a))
        r_b = mma.make_fragment_B(threads.partition_B(s_b))
        matrices = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), dtype)
        copy_a = cute.make_tiled_copy_A(matrices, mma)
        copy_b = cute.make_tiled_copy_B(matrices, mma)
        lanes_a, lanes_b = copy_a.get_slice(thread), copy_b.get_slice(thread)
        accumulator = cute.make_rmem_tensor(
            mma.partition_shape_C((self.tile, self.tile)), cutlass.Float32
        )
        accumulator.fill(0.0)
        for step in cutlass.range(cute.size(g_a, mode=[2]), unroll=1):
            cute.copy(tiled_load, from_a[None, None, None, step], to_a)
            cute.copy(tiled_load, from_b[None, None, None, step], to_b)
            cute.arch.cp_async_commit_group()
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_threads()
            cute.copy(copy_a, lanes_a.partition_S(s_a), lanes_a.retile(r_a))
            cute.copy(copy_b, lanes_b.partition_S(s_b), lanes_b.retile(r_b))
            cute.gemm(mma, accumulator, r_a, r_b, accumulator)
            cute.arch.sync_threads()
        tile_c = threads.partition_C(cute.local_tile(c, (self.tile, self.tile), (row, column)))
        cute.autovec_copy(accumulator, tile_c)


class RaggedCopy:
    """Copies the sequences of a packed (total, heads, head_dim) tensor in tiles of rows.

    Sequence b starts at row starts[b] and has lengths[b] rows. Two further dimensions make each
    sequence end where a tensor ends: with coordinates (starts + length, ROWS) there, row i of the
    first mode lies at (starts + length - ROWS + i) rows modulo 2**64, and row ROWS is outside.
    """

    ROWS, FAR = 1 << 30, (1 << 31) - 1
    tile, head_dim = 32, 64

    def __init__(self, store: str = "ragged") -> None:
        """`store`: "ragged" or "reduce", which end with a sequence, or "plain", which does not."""
        self.store = store

    @cute.jit
    def ragged(self, packed: cute.Tensor) -> cute.Tensor:
        """(total, heads, head_dim) as (ROWS, head_dim, heads, FAR, FAR)."""
        row = packed.stride[0]
        shape = (self.ROWS, self.head_dim, packed.shape[1], self.FAR, self.FAR)
        # ROWS steps of the fourth stride are 2**64 less ROWS rows, in elements and so in bytes.
        back = cute.assume(cutlass.Int64(1 << 34) - row, divby=8)
        return cute.make_tensor(
            packed.iterator,
            cute.make_layout(shape, stride=(row, 1, packed.stride[1], back, row)),
        )

    @cute.jit
    def __call__(
        self, src: cute.Tensor, dst: cute.Tensor, starts: cute.Tensor, lengths: cute.Tensor,
        stream: Any,
    ) -> None:  # fmt: skip
        box = (self.tile, self.head_dim)
        layout = cute.make_layout(box, stride=(self.head_dim, 1))
        load, tma_src = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(), self.ragged(src), layout, box
        )
        op = cpasync.CopyBulkTensorTileS2GOp()
        if cutlass.const_expr(self.store == "reduce"):
            op = cpasync.CopyReduceBulkTensorTileS2GOp(cute.ReductionKind.ADD)
        target = cute.make_tensor(dst.iterator, cute.select(dst.layout, mode=[0, 2, 1]))
        if cutlass.const_expr(self.store != "plain"):
            target = self.ragged(dst)
        store, tma_dst = cpasync.make_tiled_tma_atom(op, target, layout, box)
        self.kernel(
            load, tma_src, store, tma_dst, starts, lengths, layout, src.element_type
        ).launch(
            grid=(src.shape[1], starts.shape[0], 1), block=(32, 1, 1), stream=stream
        )  # fmt: skip

    @cute.jit
    def sequence(self, tensor: cute.Tensor, head: Any, start: Any, length: Any) -> cute.Tensor:
        """Tiles of one sequence; of a ragged tensor, rows from `length` on are outside."""
        if cutlass.const_expr(cute.rank(tensor) == 3):
            rows = cute.domain_offset((start, 0), tensor[None, None, head])
        else:
            rows = cute.domain_offset(
                (self.ROWS - length, 0), tensor[None, None, head, self.ROWS, start + length]
            )
        return cute.local_tile(rows, (self.tile, self.head_dim), (None, 0))

    @cute.kernel
    def kernel(
        self,
        load: cute.CopyAtom,
        tma_src: cute.Tensor,
        store: cute.CopyAtom,
        tma_dst: cute.Tensor,
        starts: cute.Tensor,
        lengths: cute.Tensor,
        layout: cute.Layout,
        dtype: cutlass.Constexpr[Any],
    ) -> None:
        head, batch, _ = cute.arch.block_idx()
        start, length = starts[batch], lengths[batch]
        smem = SmemAllocator()
        barrier = smem.allocate_array(cutlass.Int64, 1)
        staged = smem.allocate_tensor(dtype, layout, 1024)
        if cute.arch.thread_idx()[0] == 0:
            cute.arch.mbarrier_init(barrier, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        one = cute.make_layout(1)
        s_load, g_load = cpasync.tma_partition(
            load, 0, one, cute.group_modes(staged, 0, 2),
            cute.group_modes(self.sequence(tma_src, head, start, length), 0, 2),
        )  # fmt: skip
        s_store, g_store = cpasync.tma_partition(
            store, 0, one, cute.group_modes(staged, 0, 2),
            cute.group_modes(self.sequence(tma_dst, head, start, length), 0, 2),
        )  # fmt: skip
        for m_block in cutlass.range(cute.ceil_div(length, self.tile), unroll=1):
            with cute.arch.elect_one():
                nbytes = cute.size_in_bytes(dtype, layout)
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, nbytes)
            cute.copy(load, g_load[None, m_block], s_load, tma_bar_ptr=barrier)
            cute.arch.mbarrier_wait(barrier, m_block % 2)
            cute.copy(store, s_store, g_store[None, m_block])
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)
