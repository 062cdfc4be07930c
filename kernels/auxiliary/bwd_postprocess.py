"""After the backward: dQ = softmax_scale times its fp32 accumulator, in the input dtype."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32
from cutlass.cute.runtime import make_fake_stream

from hopperflash.plan.config import AccumulatorOrder, PostprocessConfig, Scheduler
from hopperflash.problem.problem import Signature

from ..common import fragments, operands
from ..common.band import Seqlens
from ..common.dependent import wait_for_previous
from ..common.dtypes import NUMERIC
from ..common.sequence import first_padded_block, sequence_rows
from ..common.work import AssignedTile, Tiles, first_tile, grid, single_tiles

_LANES_PER_PAIR = 8


class BackwardPostprocess:
    """A block of queries per CTA; every eight lanes have two rows at a time: those of which a
    fragment has values."""

    def __init__(self, config: PostprocessConfig, signature: Signature, dependent: bool = False):
        self.config = config
        self.dependent = dependent
        self.dtype = NUMERIC[signature.dtype]
        self.packed = signature.packed
        packed = "_packed" if signature.packed else ""
        order = config.order.value
        self.name = f"hopperflash_bwd_postprocess_{signature.dtype.value}_{order}{packed}"

    def fake_arguments(self) -> tuple[Any, ...]:
        """Stand-ins for the arguments of `__call__`."""
        return (
            operands.vector_operand(Float32, operands.any_shape(4)),
            operands.vector_operand(self.dtype, operands.any_shape(4)),
            operands.tile_table() if self.packed else None,
            Float32(1.0),
            make_fake_stream(use_tvm_ffi_env_stream=True),
        )

    @cute.jit
    def __call__(
        self,
        mAcc: cute.Tensor,  # rows (batch, seqlen_q, heads_q, head_dim), or tiles: fp32
        mdQ: cute.Tensor,  # (batch, seqlen_q, heads_q, head_dim) out
        mTiles: Any,  # (tiles, fields) of packed sequences, or None
        scale: Float32,
        stream: CUstream,
    ):
        batch, seqlen_q, heads_q, _ = mdQ.shape
        tiles = Tiles(
            table=mTiles,
            blocks=cute.ceil_div(seqlen_q, self.config.tile_m),
            heads=heads_q,
            batch=batch,
            seqlens=Seqlens(q=seqlen_q, k=Int32(0)),
            head_swizzle=Int32(1),
        )
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(mAcc, mdQ, tiles, scale).launch(
            grid=grid(tiles, Scheduler.SINGLE),
            block=(self.config.threads, 1, 1),
            use_pdl=self.dependent,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, mAcc: cute.Tensor, mdQ: cute.Tensor, tiles: Tiles, scale: Float32):
        wait_for_previous(self.dependent)
        config = self.config
        tile = first_tile(single_tiles(tiles))
        if tile.block >= 0:
            tidx, _, _ = cute.arch.thread_idx()
            pairs = config.threads // _LANES_PER_PAIR
            for step in cutlass.range_constexpr(-(-config.tile_m // (2 * pairs))):
                pair = step * pairs + tidx // _LANES_PER_PAIR
                if pair < config.tile_m // 2:
                    self.one_pair(mAcc, mdQ, tile, pair, tidx % _LANES_PER_PAIR, scale)

    @cute.jit
    def one_pair(
        self,
        mAcc: cute.Tensor,
        mdQ: cute.Tensor,
        tile: AssignedTile,
        pair: Int32,  # of the tile's rows
        lane: Int32,
        scale: Float32,
    ):
        """Two rows of dQ; those that are no queries get zeros."""
        sequence = tile.sequence
        transposed = self.config.order is AccumulatorOrder.TRANSPOSED
        # Rows between the two, and columns at a time.
        apart, width = (1, fragments.ROWS) if transposed else (fragments.HALF, fragments.COLUMNS)
        row = pair // apart * (2 * apart) + pair % apart
        first = tile.block * self.config.tile_m + row
        gdQ = sequence_rows(mdQ, tile.head, sequence.batch, sequence.q)
        for part in cutlass.range(
            lane, cute.ceil_div(gdQ.shape[1], width), _LANES_PER_PAIR, unroll=1
        ):
            sums = cute.make_rmem_tensor(cute.make_ordered_layout((2, width), (1, 0)), Float32)
            sums.fill(0.0)
            if first < sequence.seqlens.q:
                self.load_sums(sums, mAcc, tile, row, part)
            for half in cutlass.range_constexpr(2):
                this_row = first + half * apart
                if this_row < sequence.q.count:
                    self.store_row(gdQ[this_row, None], sums[half, None], part, scale)

    @cute.jit
    def load_sums(
        self, sums: cute.Tensor, mAcc: cute.Tensor, tile: AssignedTile, row: Int32, part: Int32
    ):
        """So many columns of the two rows of which `row`, in the tile, is the first."""
        config, sequence = self.config, tile.sequence
        if cutlass.const_expr(config.order is AccumulatorOrder.ROWS):
            gAcc = sequence_rows(mAcc, tile.head, sequence.batch, sequence.q)
            for half in cutlass.range_constexpr(2):
                this_row = tile.block * config.tile_m + row + half * fragments.HALF
                if this_row < sequence.seqlens.q:
                    cute.autovec_copy(octet_of(gAcc[this_row, None], part), sums[half, None])
        else:
            block = first_padded_block(sequence, self.packed, config.tile_m) + tile.block
            gAcc = mAcc[sequence.batch, tile.head, block, None]
            head_dim = cute.size(gAcc) // config.tile_m
            if cutlass.const_expr(config.order is AccumulatorOrder.TRANSPOSED):
                values = fragments.tile_fragments(gAcc, head_dim, config.tile_m)
                fragments.load_column_pair(sums, values, row, part)
            else:
                values = fragments.tile_fragments(gAcc, config.tile_m, head_dim)
                fragments.load_row_pair(sums, values, row, part)

    @cute.jit
    def store_row(self, gRow: cute.Tensor, sums: cute.Tensor, part: Int32, scale: Float32):
        """So many columns of a row, as far as there are that many."""
        octets_of_part = cute.size(sums) // fragments.COLUMNS
        for i in cutlass.range_constexpr(octets_of_part):
            octet = part * octets_of_part + i
            if octet * fragments.COLUMNS < cute.size(gRow):
                x = cute.make_rmem_tensor(fragments.COLUMNS, self.dtype)
                x.store((octet_of(sums, i).load() * scale).to(self.dtype))
                cute.autovec_copy(x, octet_of(gRow, octet))


def octet_of(row: cute.Tensor, octet: Any) -> cute.Tensor:
    """Eight neighbouring columns of a row."""
    return cute.logical_divide(row, cute.make_layout(fragments.COLUMNS))[None, octet]
