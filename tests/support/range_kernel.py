"""A kernel of nothing but the arithmetic of `kernels/common`: ranges of blocks, and turns."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from hopperflash.kernels.common.band import Band, Seqlens
from hopperflash.kernels.common.block_range import key_block_range, query_block_range
from hopperflash.kernels.common.sequence import Rows, Sequence
from hopperflash.kernels.common.tiles import KeyTile
from hopperflash.kernels.common.turns import turn_of

from hopperflash.problem import MaskKind

THREADS = 128
GIVEN = ("m_block", "n_block", "seqlen_q", "seqlen_k", "left", "right")


class RangeKernel:
    """One thread a problem: a row of `GIVEN` in, (key blocks, query blocks, turn) out."""

    def __init__(self, kind: MaskKind, tile_m: int, tile_n: int) -> None:
        self.kind, self.tile_m, self.tile_n = kind, tile_m, tile_n

    @cute.jit
    def __call__(self, mGiven: cute.Tensor, mFound: cute.Tensor, stream: Any) -> None:
        grid = (cute.ceil_div(mGiven.shape[0], THREADS), 1, 1)
        self.kernel(mGiven, mFound).launch(grid=grid, block=(THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, mGiven: cute.Tensor, mFound: cute.Tensor) -> None:
        tidx, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        row = block * THREADS + tidx
        if row < mGiven.shape[0]:
            m_block, n_block, seqlen_q, seqlen_k, left, right = (mGiven[row, i] for i in range(6))
            tiles = (self.tile_m, self.tile_n)
            seqlens, band = Seqlens(seqlen_q, seqlen_k), Band(self.kind, left, right)
            keys = key_block_range(m_block, seqlens, band, *tiles)
            queries = query_block_range(n_block, seqlens, band, *tiles)
            zero = Int32(0)
            rows = Rows(zero, zero)
            sequence = Sequence(zero, zero, rows, rows, seqlens)
            tile = KeyTile(n_block, zero, zero, queries, sequence, zero)
            turn = turn_of(tile, m_block, band, *tiles)
            for i in cutlass.range_constexpr(4):
                mFound[row, i] = keys[i]
                mFound[row, 4 + i] = queries[i]
            mFound[row, 8] = turn
