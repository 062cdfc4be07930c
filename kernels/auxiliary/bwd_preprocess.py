"""Before the backward: delta, LSE in base 2, and a dQ accumulator of zeros.

    delta    = rowsum(dO o O) - dLSE      (dS = P o (dP - delta) then holds for both gradients)
    LSE_log2 = LSE log2(e), +inf where no key was seen, so that P = 2^(S - LSE_log2) is 0 there

Source: FlashAttention-2, arXiv 2307.08691, algorithm 2; the dLSE term follows from
d LSE / d S = P.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Constexpr, Float32, Int32
from cutlass.cute.runtime import make_fake_stream

from hopperflash.plan.config import AccumulatorOrder, PreprocessConfig, Scheduler
from hopperflash.problem.problem import Signature

from ..common import operands
from ..common.band import Seqlens
from ..common.dependent import wait_for_previous
from ..common.dtypes import NUMERIC
from ..common.sequence import first_padded_block, sequence_rows, sequence_statistic
from ..common.softmax import LOG2_E
from ..common.work import AssignedTile, Tiles, first_tile, grid, single_tiles

_LANES_PER_ROW = 8
_VECTOR = 8  # 16-bit elements in 16 bytes


class Tensors(NamedTuple):
    """The tensors as the kernel sees them."""

    mO: cute.Tensor
    mdO: cute.Tensor
    mLSE: cute.Tensor
    mdLSE: cute.Tensor
    mLSE_log2: cute.Tensor
    mDelta: cute.Tensor
    mdQ: cute.Tensor


class BackwardPreprocess:
    """A block of queries per CTA, one row for every eight lanes at a time."""

    def __init__(self, config: PreprocessConfig, signature: Signature, dependent: bool = False):
        self.config = config
        self.dependent = dependent
        self.dtype = NUMERIC[signature.dtype]
        self.packed = signature.packed
        packed = "_packed" if signature.packed else ""
        self.name = f"hopperflash_bwd_preprocess_{signature.dtype.value}{packed}"

    def fake_arguments(self) -> tuple[Any, ...]:
        """Stand-ins for the arguments of `__call__`."""
        dtype = self.dtype
        batch, heads_q, seqlen_q = cute.sym_int(), cute.sym_int(), cute.sym_int()
        head_dim_v = cute.sym_int(divisibility=8)
        padded = cute.sym_int(divisibility=4)
        out_shape = (batch, seqlen_q, heads_q, head_dim_v)
        return (
            operands.vector_operand(dtype, out_shape),
            operands.vector_operand(dtype, out_shape),
            operands.row_statistic((batch, heads_q, seqlen_q)),
            operands.row_statistic((batch, heads_q, seqlen_q)),
            operands.vector_operand(Float32, (batch, heads_q, padded)),
            operands.vector_operand(Float32, (batch, heads_q, padded)),
            operands.vector_operand(Float32, operands.any_shape(4)),
            operands.tile_table() if self.packed else None,
            make_fake_stream(use_tvm_ffi_env_stream=True),
        )

    @cute.jit
    def __call__(  # noqa: PLR0913, PLR0917 - one tensor each is what a launch takes
        self,
        mO: cute.Tensor,  # (batch, seqlen_q, heads_q, head_dim_v)
        mdO: cute.Tensor,  # (batch, seqlen_q, heads_q, head_dim_v)
        mLSE: cute.Tensor,  # (batch, heads_q, seqlen_q) fp32
        mdLSE: cute.Tensor,  # (batch, heads_q, seqlen_q) fp32
        mLSE_log2: cute.Tensor,  # (batch, heads_q, padded rows) out
        mDelta: cute.Tensor,  # (batch, heads_q, padded rows) out
        mdQ: cute.Tensor,  # rows (batch, seqlen_q, heads_q, head_dim), or tiles: fp32 out, zeros
        mTiles: Any,  # (tiles, fields) of packed sequences, or None
        stream: CUstream,
    ):
        batch, heads_q, _ = mDelta.shape
        seqlen_q = mO.shape[1]
        tiles = Tiles(
            table=mTiles,
            blocks=cute.ceil_div(seqlen_q, self.config.tile_m),
            heads=heads_q,
            batch=batch,
            seqlens=Seqlens(q=seqlen_q, k=Int32(0)),
            head_swizzle=Int32(1),
        )
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        tensors = Tensors(mO, mdO, mLSE, mdLSE, mLSE_log2, mDelta, mdQ)
        self.kernel(tensors, tiles).launch(
            grid=grid(tiles, Scheduler.SINGLE),
            block=(self.config.threads, 1, 1),
            use_pdl=self.dependent,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, tensors: Tensors, tiles: Tiles):
        wait_for_previous(self.dependent)
        config = self.config
        tile = first_tile(single_tiles(tiles))
        if tile.block >= 0:
            tidx, _, _ = cute.arch.thread_idx()
            if cutlass.const_expr(config.zero_dq not in {None, AccumulatorOrder.ROWS}):
                self.zero_tile(tensors.mdQ, tile, tidx)
            rows = config.threads // _LANES_PER_ROW
            for step in cutlass.range_constexpr(config.tile_m // rows):
                row_in_block = step * rows + tidx // _LANES_PER_ROW
                self.one_row(tensors, tile, row_in_block, tidx % _LANES_PER_ROW)

    @cute.jit
    def zero_tile(self, mdQ: cute.Tensor, tile: AssignedTile, tidx: Int32):
        """Zeros for all rows of a tile that has queries."""
        config, sequence = self.config, tile.sequence
        if tile.block * config.tile_m < sequence.seqlens.q:
            block = first_padded_block(sequence, self.packed, config.tile_m) + tile.block
            fill_with_zeros(mdQ[sequence.batch, tile.head, block, None], tidx, config.threads)

    @cute.jit
    def one_row(self, tensors: Tensors, tile: AssignedTile, row_in_block: Int32, lane: Int32):
        """Statistics of a row, and zeros for its dQ."""
        config, sequence, head, batch = self.config, tile.sequence, tile.head, tile.sequence.batch
        row = tile.block * config.tile_m + row_in_block
        exists = row < sequence.seqlens.q
        product = Float32(0.0)
        if exists:
            if cutlass.const_expr(config.zero_dq is AccumulatorOrder.ROWS):
                gdQ = sequence_rows(tensors.mdQ, head, batch, sequence.q)
                fill_with_zeros(gdQ[row, None], lane, _LANES_PER_ROW)
            gO = sequence_rows(tensors.mO, head, batch, sequence.q)
            gdO = sequence_rows(tensors.mdO, head, batch, sequence.q)
            product = row_product(gO[row, None], gdO[row, None], lane)
        product = cute.arch.warp_reduction_sum(product, threads_in_group=_LANES_PER_ROW)
        # Sequences without queries have no place in the padded arrays.
        if lane == 0 and sequence.seqlens.q > 0:
            # Rows past the end are read by the last tile and must weigh nothing.
            lse_log2, delta = Float32.inf, Float32(0.0)
            if exists:
                lse = sequence_statistic(tensors.mLSE, head, batch, sequence.q)[0, row]
                if lse != -Float32.inf:
                    lse_log2 = lse * LOG2_E
                    dLSE = sequence_statistic(tensors.mdLSE, head, batch, sequence.q)[0, row]
                    delta = product - dLSE
            padded = first_padded_block(sequence, self.packed, config.tile_m) * config.tile_m + row
            tensors.mLSE_log2[batch, head, padded] = lse_log2
            tensors.mDelta[batch, head, padded] = delta


@cute.jit
def row_product(rowA: cute.Tensor, rowB: cute.Tensor, lane: Int32):
    """This lane's share of the dot product of two rows, in fp32."""
    A = cute.logical_divide(rowA, cute.make_layout(_VECTOR))  # (vector, vectors)
    B = cute.logical_divide(rowB, cute.make_layout(_VECTOR))
    total = Float32(0.0)
    for v in cutlass.range(lane, cute.size(A, mode=[1]), _LANES_PER_ROW):
        a = cute.make_rmem_tensor(_VECTOR, rowA.element_type)
        b = cute.make_rmem_tensor_like(a)
        cute.autovec_copy(A[None, v], a)
        cute.autovec_copy(B[None, v], b)
        products = a.load().to(Float32) * b.load().to(Float32)
        total = products.reduce(cute.ReductionOp.ADD, total, 0)
    return total


@cute.jit
def fill_with_zeros(x: cute.Tensor, lane: Int32, lanes: Constexpr[int]):
    """Zeros into this lane's share of fp32 values on end."""
    vectors = cute.logical_divide(x, cute.make_layout(_VECTOR))
    zeros = cute.make_rmem_tensor(_VECTOR, Float32)
    zeros.fill(0.0)
    for v in cutlass.range(lane, cute.size(vectors, mode=[1]), lanes):
        cute.autovec_copy(zeros, vectors[None, v])
