"""Global tiles to shared memory by cp.async, zeros where the tensor ends."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Int32
from cutlass.cute.nvgpu import LoadCacheMode, cpasync

from .mma import contiguous_columns

_VECTOR = 8  # 16-bit elements in 16 bytes


def tiled_copy(dtype: type[cutlass.Numeric], threads: int, head_dim: int) -> cute.TiledCopy:
    """16 bytes a thread, rows of one swizzle atom's width."""
    atom = cute.make_copy_atom(
        cpasync.CopyG2SOp(cache_mode=LoadCacheMode.GLOBAL), dtype, num_bits_per_copy=128
    )
    return _rowwise(atom, threads, head_dim)


def tiled_store(dtype: type[cutlass.Numeric], threads: int, head_dim: int) -> cute.TiledCopy:
    """The same partition for copies through registers."""
    atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), dtype, num_bits_per_copy=128)
    return _rowwise(atom, threads, head_dim)


def _rowwise(atom: cute.CopyAtom, threads: int, head_dim: int) -> cute.TiledCopy:
    per_row = contiguous_columns(head_dim) // _VECTOR
    return cute.make_tiled_copy_tv(
        atom,
        cute.make_ordered_layout((threads // per_row, per_row), order=(1, 0)),
        cute.make_layout((1, _VECTOR)),
    )


@cute.jit
def load_tile(
    copy: cute.TiledCopy,
    tidx: Int32,
    mX: cute.Tensor,  # (seqlen, head_dim)
    sX: cute.Tensor,  # (rows, padded head_dim)
    block: Int32,
):
    """Start copying a tile; rows and columns past the tensor's end become zeros."""
    shape = (cute.size(sX, mode=[0]), cute.size(sX, mode=[1]))
    thread_copy = copy.get_slice(tidx)
    gX = cute.local_tile(mX, shape, (block, 0))
    tXgX, tXsX = thread_copy.partition_S(gX), thread_copy.partition_D(sX)
    tXcX = thread_copy.partition_S(cute.make_identity_tensor(shape))
    exists = _predicate(tXcX, block * shape[0], mX.shape)
    cute.copy(copy, tXgX, tXsX, pred=exists)


@cute.jit
def store_tile(
    copy: cute.TiledCopy,
    tidx: Int32,
    sX: cute.Tensor,  # (rows, padded head_dim)
    mX: cute.Tensor,  # (seqlen, head_dim)
    block: Int32,
):
    """Shared to global through registers, for the rows and columns that exist."""
    shape = (cute.size(sX, mode=[0]), cute.size(sX, mode=[1]))
    thread_copy = copy.get_slice(tidx)
    gX = cute.local_tile(mX, shape, (block, 0))
    tXsX, tXgX = thread_copy.partition_S(sX), thread_copy.partition_D(gX)
    tXcX = thread_copy.partition_S(cute.make_identity_tensor(shape))
    tXrX = cute.make_rmem_tensor_like(tXsX)
    cute.autovec_copy(tXsX, tXrX)
    cute.copy(copy, tXrX, tXgX, pred=_predicate(tXcX, block * shape[0], mX.shape))


@cute.jit
def load_heads(
    copy: cute.TiledCopy,
    tidx: Int32,
    mX: cute.Tensor,  # (group, seqlen, head_dim)
    sX: cute.Tensor,  # (rows, padded head_dim)
    block: Int32,
):
    """Start copying a tile whose row r is head r % group of query r // group.

    Rows of no query of the tile become zeros, and so do columns past the tensor's end.
    """
    tXsX = copy.get_slice(tidx).partition_D(sX)
    for m in cutlass.range_constexpr(cute.size(tXsX, mode=[1])):
        gX, exists = _row_of_heads(copy, tidx, mX, sX, block, m)
        cute.copy(copy, gX, tXsX[None, m, None], pred=exists)


@cute.jit
def store_heads(
    copy: cute.TiledCopy,
    tidx: Int32,
    sX: cute.Tensor,  # (rows, padded head_dim)
    mX: cute.Tensor,  # (group, seqlen, head_dim)
    block: Int32,
):
    """Shared to global through registers, for the rows and columns that exist."""
    tXsX = copy.get_slice(tidx).partition_S(sX)
    tXrX = cute.make_rmem_tensor_like(tXsX)
    cute.autovec_copy(tXsX, tXrX)
    for m in cutlass.range_constexpr(cute.size(tXsX, mode=[1])):
        gX, exists = _row_of_heads(copy, tidx, mX, sX, block, m)
        cute.copy(copy, tXrX[None, m, None], gX, pred=exists)


@cute.jit
def _row_of_heads(
    copy: cute.TiledCopy,
    tidx: Int32,
    mX: cute.Tensor,  # (group, seqlen, head_dim)
    sX: cute.Tensor,
    block: Int32,
    m: Constexpr[int],
):
    """A thread's part of its row number m in global memory, and whether its 16 bytes exist."""
    rows, columns = cute.size(sX, mode=[0]), cute.size(sX, mode=[1])
    group = cute.size(mX, mode=[0])
    queries = rows // group
    thread_copy = copy.get_slice(tidx)
    tXcX = thread_copy.partition_S(cute.make_identity_tensor((rows, columns)))
    row = tXcX[(0, 0), m, 0][0]
    query = block * queries + row // group
    row_exists = query < cute.size(mX, mode=[1])
    if cutlass.const_expr(rows % group != 0):
        row_exists = row_exists and row < group * queries
    # All rows of a layout without a stride along them are this one.
    row_of_tile = cute.make_layout((rows, columns), stride=(0, 1))
    gX = cute.make_tensor(mX[row % group, query, None].iterator, row_of_tile)
    exists = cute.make_rmem_tensor((tXcX.shape[0][1], cute.size(tXcX, mode=[2])), Boolean)
    for k in cutlass.range_constexpr(cute.size(exists, mode=[1])):
        exists[0, k] = row_exists and tXcX[(0, 0), m, k][1] < cute.size(mX, mode=[2])
    return thread_copy.partition_S(gX)[None, m, None], exists


@cute.jit
def _predicate(tXcX: cute.Tensor, first_row: Int32, shape: cute.Shape):
    """(vectors, rows, columns): whether a thread's 16 bytes lie inside (seqlen, head_dim)."""
    exists = cute.make_rmem_tensor(
        (tXcX.shape[0][1], cute.size(tXcX, mode=[1]), cute.size(tXcX, mode=[2])), Boolean
    )
    for m in cutlass.range_constexpr(cute.size(exists, mode=[1])):
        row_exists = first_row + tXcX[(0, 0), m, 0][0] < shape[0]
        for k in cutlass.range_constexpr(cute.size(exists, mode=[2])):
            exists[0, m, k] = row_exists and tXcX[(0, 0), m, k][1] < shape[1]
    return exists
