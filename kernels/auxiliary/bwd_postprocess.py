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
from ..common.work import AssignedTile, Tiles, Walk, first_tile, grid

_LANES_PER_PAIR = 8


class BackwardPostprocess:
    """A block of queries per CTA; every eight lanes have two rows, eight apart, at a time."""

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
        walk = Walk(Scheduler.SINGLE, descending=False, swizzled=False, cluster=1, tiles=tiles)
        tile = first_tile(walk)
        if tile.block >= 0:
            tidx, _, _ = cute.arch.thread_idx()
            pairs = config.threads // _LANES_PER_PAIR
            for step in cutlass.range_constexpr(config.tile_m // 2 // pairs):
                pair = step * pairs + tidx // _LANES_PER_PAIR
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
        row = pair // fragments.HALF * fragments.ROWS + pair % fragments.HALF
        first = tile.block * self.config.tile_m + row
        gdQ = sequence_rows(mdQ, tile.head, sequence.batch, sequence.q)
        octets = gdQ.shape[1] // fragments.COLUMNS
        for octet in cutlass.range(lane, octets, _LANES_PER_PAIR, unroll=1):
            sums = cute.make_rmem_tensor(
                cute.make_ordered_layout((2, fragments.COLUMNS), (1, 0)), Float32
            )
            sums.fill(0.0)
            if cutlass.const_expr(self.config.order is AccumulatorOrder.FRAGMENTS):
                if first < sequence.seqlens.q:
                    block = first_padded_block(sequence, self.packed, self.config.tile_m)
                    gAcc = fragments.tile_fragments(
                        mAcc[sequence.batch, tile.head, block + tile.block, None],
                        octets,
                        self.config.tile_m,
                    )
                    fragments.load_row_pair(sums, gAcc, row, octet)
            for half in cutlass.range_constexpr(2):
                this_row = first + half * fragments.HALF
                if cutlass.const_expr(self.config.order is AccumulatorOrder.ROWS):
                    if this_row < sequence.seqlens.q:
                        gAcc = sequence_rows(mAcc, tile.head, sequence.batch, sequence.q)
                        cute.autovec_copy(octet_of(gAcc[this_row, None], octet), sums[half, None])
                if this_row < sequence.q.count:
                    x = cute.make_rmem_tensor(fragments.COLUMNS, self.dtype)
                    x.store((sums[half, None].load() * scale).to(self.dtype))
                    cute.autovec_copy(x, octet_of(gdQ[this_row, None], octet))


def octet_of(row: cute.Tensor, octet: Int32) -> cute.Tensor:
    """Eight neighbouring columns of a row."""
    return cute.logical_divide(row, cute.make_layout(fragments.COLUMNS))[None, octet]
