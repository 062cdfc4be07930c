"""dQ tiles leave: consumer threads add what they have of them to fp32 sums in global memory.

Deterministic: the CTAs that add to a query tile take turns (`common/turns.py`). A turn is passed
on in the next step, when the additions have long been made, so that nobody waits for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32, Int64, pipeline

from hopperflash.plan.config import BackwardConfig

from ...common import fragments, turns
from ...common.band import Band
from ...common.tiles import KeyTile
from ...common.work import anew
from .. import wgmma
from .storage import Barrier

NO_TURN = 0


def adders(config: BackwardConfig) -> pipeline.NamedBarrier:
    """The barrier of the warpgroups that compute dQ."""
    threads = config.dq_warpgroups * wgmma.THREADS_PER_WARPGROUP
    return pipeline.NamedBarrier(barrier_id=int(Barrier.TURN), num_threads=threads)


@dataclass(frozen=True)
class AddContext:
    """What the warps that add dQ need."""

    config: Constexpr[BackwardConfig]
    parts: Constexpr[tuple[int, ...]]  # `BackwardConfig.dq_parts` of their warpgroup
    band: Band
    mdQ: cute.Tensor  # (batch, heads_q, query blocks, tile_m head_dim) fp32
    mTurn: cute.Tensor  # (batch, heads_q, query blocks) int32
    consumer_tidx: Int32


@cute.jit
def thread_sums(ctx: AddContext, tile: KeyTile, head: Int32):
    """Where this thread's part of the first query tile of a head is summed."""
    config = ctx.config
    gdQ = fragments.tile_fragments(
        ctx.mdQ[tile.sequence.batch, head, tile.first_padded_block, None], *extent(ctx)
    )
    group, share, lane = thread_place(config, ctx.consumer_tidx)
    return anew(gdQ[None, lane, share * octets_of_share(config), group].iterator.toint())


@cute.jit
def next_turn(ctx: AddContext, tile: KeyTile, head: Int32, m_block: Int32, counter: Int64):
    """Pass the last turn on, which all warps have fenced, and wait for that of a query tile.

    Returns its counter.
    """
    config = ctx.config
    if cutlass.const_expr(config.deterministic):
        pass_turn_on(ctx, counter)
        place = (tile.sequence.batch, head, tile.first_padded_block + m_block)
        counter = cute.domain_offset(place, ctx.mTurn).iterator.toint()
        if ctx.consumer_tidx == 0:
            turn = turns.turn_of(tile, m_block, ctx.band, config.tile_m, config.tile_n)
            turns.wait_for_turn(counter, turn)
        adders(config).arrive_and_wait()
    return counter


@cute.jit
def add_dQ(
    ctx: AddContext,
    first_tile: Int64,  # as of `thread_sums`
    m_block: Int32,
    acc_dQ: cute.Tensor,
    part: Constexpr[int],
):
    """dQ[m_block] += acc_dQ, of which it may be a part."""
    config = ctx.config
    rows, columns = extent(ctx)
    octets, groups = columns // fragments.COLUMNS, rows // fragments.ROWS
    address = first_tile + Int64(m_block) * (octets * groups * fragments.OCTET_BYTES)
    rdQ = fragments.by_octet(acc_dQ)
    group, share, _ = thread_place(config, ctx.consumer_tidx)
    groups_before = part * config.dq_tile[0] // fragments.ROWS
    octets_before = groups_before * octets if part else 0
    for i in cutlass.range_constexpr(cute.size(rdQ, mode=[1])):
        octet = octets_before + i
        if cutlass.const_expr(config.exact_head_dim):
            fragments.add_values(address, octet, rdQ[None, i])
        elif cutlass.const_expr(config.dq_swap_ab):
            if groups_before + group < groups:
                fragments.add_values(address, octet, rdQ[None, i])
        else:
            if share * octets_of_share(config) + i < octets:
                fragments.add_values(address, octet, rdQ[None, i])


def extent(ctx: AddContext) -> tuple[Any, Any]:
    """(rows, columns) of a tile of dQ, or of dQ^T. Head dims are the padded ones, if those are
    exact."""
    config = ctx.config
    head_dim = config.head_dim if config.exact_head_dim else ctx.mdQ.shape[3] // config.tile_m
    return (head_dim, config.tile_m) if config.dq_swap_ab else (config.tile_m, head_dim)


def octets_of_share(config: BackwardConfig) -> int:
    """Octets of dQ's columns that a warpgroup has."""
    return config.head_dim // fragments.COLUMNS // config.query_shares


def thread_place(config: BackwardConfig, consumer_tidx: Int32) -> tuple[Int32, Any, Int32]:
    """(group of rows, share of the columns, lane) of a thread's part of a tile."""
    if config.dq_swap_ab:
        consumer_tidx &= wgmma.THREADS_PER_WARPGROUP - 1
    warp, lane = consumer_tidx >> 5, consumer_tidx & (cute.arch.WARP_SIZE - 1)
    if config.query_shares == 1:
        return warp, 0, lane
    groups = config.tile_m // fragments.ROWS
    return warp & (groups - 1), consumer_tidx // (groups * cute.arch.WARP_SIZE), lane


@cute.jit
def pass_turn_on(ctx: AddContext, counter: Int64):
    """One thread lets the next CTA add, once all threads have made their additions."""
    if ctx.consumer_tidx == 0 and counter != NO_TURN:
        turns.pass_turn(counter)


@cute.jit
def pass_last_turn(ctx: AddContext, counter: Int64):
    """The same with nothing to hide the wait behind."""
    cute.arch.fence_acq_rel_gpu()
    adders(ctx.config).arrive_and_wait()
    pass_turn_on(ctx, counter)
