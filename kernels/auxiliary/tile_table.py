"""The tiles of packed sequences, longest sequences first: what every CTA of a pass computes.

One CTA a table. Sequences are ranked in chunks of one a thread: by the rows of the other side that
they see, which is what a tile costs, and among equals by position. Rows that belong to no sequence,
before the first and behind the last, form two more sequences without queries and keys, so that
results are written there too. Offsets are clamped into the tensors: whatever the lengths say, no
kernel addresses memory outside.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Constexpr, Int32
from cutlass.cute.runtime import make_fake_stream
from cutlass.memory import SmemAllocator

from hopperflash.plan.config import TILE_FIELDS, TileTableConfig
from hopperflash.problem.problem import Signature

from ..common import operands
from ..common.dependent import wait_for_previous
from ..common.sequence import Rows

_WARP = 32


class Side(NamedTuple):
    """Offsets and lengths of the queries or of the keys."""

    cu_seqlens: cute.Tensor  # (sequences + 1,) int32
    seqused: Any  # (sequences,) int32, or None where all rows of a sequence count
    total: Int32


class Chunk(NamedTuple):
    """Shared memory of a chunk of sequences: (threads,) int32 each."""

    cost: cute.Tensor
    blocks: cute.Tensor
    first: cute.Tensor  # row of the table where a sequence's tiles begin


class TileTable:
    """Tables of (tiles, `TILE_FIELDS`) int32, for queries, keys or both."""

    def __init__(self, config: TileTableConfig, signature: Signature, dependent: bool = False):
        self.config = config
        self.dependent = dependent
        self.name = "hopperflash_tile_table"

    def fake_arguments(self) -> tuple[Any, ...]:
        """Stand-ins for the arguments of `__call__`."""
        config = self.config

        def lengths(given: bool) -> Any:
            return operands.integers(1) if given else None

        def table(tile: int | None) -> Any:
            return None if tile is None else operands.tile_table()

        return (
            operands.integers(1),
            operands.integers(1),
            lengths(config.seqused[0]),
            lengths(config.seqused[1]),
            table(config.tile_m),
            table(config.tile_n),
            Int32(1),
            Int32(1),
            make_fake_stream(use_tvm_ffi_env_stream=True),
        )

    @cute.jit
    def __call__(  # noqa: PLR0913, PLR0917 - one tensor each is what a launch takes
        self,
        mCuSeqlensQ: cute.Tensor,  # (sequences + 1,)
        mCuSeqlensK: cute.Tensor,  # (sequences + 1,)
        mSeqUsedQ: Any,  # (sequences,) or None
        mSeqUsedK: Any,  # (sequences,) or None
        mTilesQ: Any,  # (tiles, fields) out, or None
        mTilesK: Any,  # (tiles, fields) out, or None
        total_q: Int32,
        total_k: Int32,
        stream: CUstream,
    ):
        tables = sum(tile is not None for tile in (self.config.tile_m, self.config.tile_n))
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(
            Side(mCuSeqlensQ, mSeqUsedQ, total_q),
            Side(mCuSeqlensK, mSeqUsedK, total_k),
            mTilesQ,
            mTilesK,
        ).launch(
            grid=(tables, 1, 1),
            block=(self.config.threads, 1, 1),
            use_pdl=self.dependent,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, side_q: Side, side_k: Side, mTilesQ: Any, mTilesK: Any):
        wait_for_previous(self.dependent)
        config = self.config
        block, _, _ = cute.arch.block_idx()
        if cutlass.const_expr(mTilesQ is not None):
            if block == 0:
                self.write_table(mTilesQ, side_q, side_k, of_queries=True)
        if cutlass.const_expr(mTilesK is not None):
            if block == (0 if config.tile_m is None else 1):
                self.write_table(mTilesK, side_q, side_k, of_queries=False)

    @cute.jit
    def write_table(
        self, mTiles: cute.Tensor, side_q: Side, side_k: Side, of_queries: Constexpr[bool]
    ):
        """All tiles of one side, chunk by chunk, then rows without a tile."""
        config = self.config
        tidx, _, _ = cute.arch.thread_idx()
        threads = config.threads
        allocator = SmemAllocator()
        chunk = Chunk(*(allocator.allocate_tensor(Int32, cute.make_layout(threads)) for _ in "123"))
        sequences = cute.size(side_q.cu_seqlens) - 1 + 2
        next_row = Int32(0)
        for start in cutlass.range(0, sequences, threads, unroll=1):
            self.rank_chunk(chunk, start + tidx, side_q, side_k, of_queries)
            cute.arch.sync_threads()
            total = Int32(0)
            first = next_row
            for other in cutlass.range(threads, unroll=1):
                cost, blocks = chunk.cost[other], chunk.blocks[other]
                earlier = cost > chunk.cost[tidx] or (cost == chunk.cost[tidx] and other < tidx)
                first += blocks if earlier else Int32(0)
                total += blocks
            chunk.first[tidx] = first
            next_row += total
            cute.arch.sync_threads()
            self.write_chunk(mTiles, chunk, start, (side_q, side_k), of_queries)
            cute.arch.sync_threads()
        for row in cutlass.range(next_row + tidx, cute.size(mTiles, mode=[0]), threads, unroll=1):
            mTiles[row, 0] = Int32(-1)

    @cute.jit
    def rank_chunk(
        self,
        chunk: Chunk,
        sequence: Int32,
        side_q: Side,
        side_k: Side,
        of_queries: Constexpr[bool],
    ):
        """This thread's sequence: its blocks, and what one of them costs."""
        tidx, _, _ = cute.arch.thread_idx()
        rows_q, seqlen_q = sequence_of(side_q, sequence)
        rows_k, seqlen_k = sequence_of(side_k, sequence)
        if cutlass.const_expr(of_queries):
            chunk.cost[tidx] = seqlen_k
            chunk.blocks[tidx] = cute.ceil_div(rows_q.count, self.config.tile_m)
        else:
            chunk.cost[tidx] = seqlen_q
            chunk.blocks[tidx] = cute.ceil_div(rows_k.count, self.config.tile_n)

    @cute.jit
    def write_chunk(
        self,
        mTiles: cute.Tensor,
        chunk: Chunk,
        start: Int32,
        sides: tuple[Side, Side],
        of_queries: Constexpr[bool],
    ):
        """A warp a sequence, a lane a tile."""
        config = self.config
        descending = config.descending_q if of_queries else config.descending_k
        tidx, _, _ = cute.arch.thread_idx()
        for slot in cutlass.range(tidx // _WARP, config.threads, config.threads // _WARP, unroll=1):
            blocks, first, sequence = chunk.blocks[slot], chunk.first[slot], start + slot
            rows_q, seqlen_q = sequence_of(sides[0], sequence)
            rows_k, seqlen_k = sequence_of(sides[1], sequence)
            # Offsets that do not ascend may ask for more tiles than there can be.
            blocks_held = min(blocks, cute.size(mTiles, mode=[0]) - first)
            for i in cutlass.range(tidx % _WARP, blocks_held, _WARP, unroll=1):
                block = blocks - 1 - i if cutlass.const_expr(descending) else i
                values = {
                    "block": block,
                    "sequence": sequence,
                    "first_q": rows_q.first,
                    "rows_q": rows_q.count,
                    "seqlen_q": seqlen_q,
                    "first_k": rows_k.first,
                    "rows_k": rows_k.count,
                    "seqlen_k": seqlen_k,
                }
                fields = cute.make_rmem_tensor(len(TILE_FIELDS), Int32)
                for f in cutlass.range_constexpr(len(TILE_FIELDS)):
                    fields[f] = values[TILE_FIELDS[f]]
                cute.autovec_copy(fields, mTiles[first + i, None])


@cute.jit
def sequence_of(side: Side, sequence: Int32):
    """(rows, length) of a sequence, or of the rows that belong to none.

    Number `sequences` is what lies behind the last, the one after that what lies before the first;
    later ones are empty.
    """
    sequences = cute.size(side.cu_seqlens) - 1
    begin, end, length = Int32(0), Int32(0), Int32(0)
    if sequence < sequences:
        begin = clamped(side.cu_seqlens[sequence], side.total)
        end = max(clamped(side.cu_seqlens[sequence + 1], side.total), begin)
        length = end - begin
        if cutlass.const_expr(side.seqused is not None):
            length = clamped(side.seqused[sequence], length)
    if sequence == sequences:
        begin = clamped(side.cu_seqlens[sequences], side.total)
        end = side.total
    if sequence == sequences + 1:
        end = clamped(side.cu_seqlens[0], side.total)
    return Rows(begin, end - begin), length


@cute.jit
def clamped(value: Int32, limit: Int32):
    """`value`, within [0, limit]."""
    return min(max(value, 0), limit)
