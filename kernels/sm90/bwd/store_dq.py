"""The store warp: adds each dQ tile to the fp32 accumulator in global memory by TMA.

Deterministic: the CTAs that add to a query tile take turns. A counter per query tile holds the
next turn; a CTA's turn is its place, in the order of the launch, among the key tiles that the
queries see.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32, pipeline

from hopperflash.plan.config import BackwardConfig

from .. import tma
from .mma import consumer_threads
from .storage import Barrier, SmemTensors
from .tiles import KeyTile


@dataclass(frozen=True)
class StoreContext:
    """Where the store warp adds the dQ tiles of one key tile."""

    config: Constexpr[BackwardConfig]
    causal: Constexpr[bool]
    tma_dQ: tma.TmaTensor  # (seqlen_q, head_dim, heads_q, batch) fp32
    mTurn: cute.Tensor  # (batch, heads_q, query blocks) int32
    smem: SmemTensors
    tile: KeyTile


@cute.jit
def store_dQ(ctx: StoreContext):
    """Runs in one whole warp: dQ[m_block] += tile, for all query tiles in the consumers' order."""
    config, tile = ctx.config, ctx.tile
    threads = consumer_threads(config) + cute.arch.WARP_SIZE
    empty = pipeline.NamedBarrier(barrier_id=int(Barrier.DQ_EMPTY), num_threads=threads)
    full = pipeline.NamedBarrier(barrier_id=int(Barrier.DQ_FULL), num_threads=threads)
    for g in cutlass.range(tile.group, unroll=1):
        head = tile.head_k * tile.group + g
        gdQ = cute.local_tile(
            ctx.tma_dQ.tensor[None, None, head, tile.batch],
            (config.tile_m, config.head_dim),
            (None, 0),
        )  # (tile_m, head_dim, query_blocks)
        tdQsdQ, tdQgdQ = tma.partition(ctx.tma_dQ, ctx.smem.sdQ, gdQ)
        for m_block in cutlass.range(tile.queries.begin, tile.queries.end, unroll=1):
            empty.arrive()
            full.arrive_and_wait()
            counter = ctx.mTurn.iterator
            if cutlass.const_expr(config.deterministic):
                counter = cute.domain_offset((tile.batch, head, m_block), ctx.mTurn).iterator
                wait_for_turn(counter, turn_of(ctx, m_block))
            cute.copy(ctx.tma_dQ.atom, tdQsdQ[None, 0], tdQgdQ[None, m_block])
            cute.arch.cp_async_bulk_commit_group()
            if cutlass.const_expr(config.deterministic):
                cute.arch.cp_async_bulk_wait_group(0)
                pass_turn(counter)
            else:
                cute.arch.cp_async_bulk_wait_group(0, read=True)
    cute.arch.cp_async_bulk_wait_group(0)


@cute.jit
def turn_of(ctx: StoreContext, m_block: Int32):
    """The place of this CTA among those that add to a query tile.

    Full: all key tiles, in ascending order. Causal: the key tiles up to the diagonal, from the
    diagonal down.
    """
    config, tile = ctx.config, ctx.tile
    turn = tile.n_block
    if cutlass.const_expr(ctx.causal):
        last_key = (m_block + 1) * config.tile_m - 1 + tile.seqlens.k - tile.seqlens.q
        last_key = min(last_key, tile.seqlens.k - 1)
        turn = last_key // config.tile_n - tile.n_block
    return turn


@cute.jit
def wait_for_turn(counter: cute.Pointer, turn: Int32):
    """Spin until `counter` is `turn`; what the earlier CTAs added is then visible."""
    seen = Int32(-1)
    while seen != turn:
        seen = load_acquire(counter)
    # The additions go through the async proxy.
    cute.arch.fence_proxy("async.global")


@cute.jit
def pass_turn(counter: cute.Pointer):
    """Let the next CTA add, after this warp's additions are complete."""
    cute.arch.fence_proxy("async.global")
    with cute.arch.elect_one():
        cute.arch.red(counter, Int32(1), op="add", dtype="s32", sem="release", scope="gpu")


@cute.jit
def load_acquire(pointer: cute.Pointer):
    """ld.acquire.gpu of an int32."""
    return cute.arch.inline_ptx(
        "ld.acquire.gpu.global.s32 {$w0}, [{$r0}];",
        write_only_types=[Int32],
        read_only_args=[pointer.toint()],
    )
