"""The producers: Q of a tile, and its K and V blocks from the last to the first that is seen.

A CTA with several tiles has a warp for each, since Q of the next tile must wait until O of this
one has left its memory, which K and V need not. The CTAs of a cluster load a share of the rows of
each block, into all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32, pipeline

from hopperflash.plan.config import ForwardConfig, Scheduler

from ...common.band import Band
from ...common.block_range import key_block_range
from ...common.sequence import Rows
from ...common.tiles import QueryTile, query_tile
from ...common.work import AssignedTile
from .. import clusters, tma
from .storage import Pipelines, SmemTensors


@dataclass(frozen=True)
class LoadContext:
    """What the producers need."""

    config: Constexpr[ForwardConfig]
    packed: Constexpr[bool]
    tma_Q: tma.TmaTensor  # (seqlen_q, head_dim, heads_q, batch)
    tma_K: tma.TmaTensor  # (seqlen_k, head_dim, heads_k, batch)
    tma_Vt: tma.TmaTensor  # (head_dim_v, seqlen_k, heads_k, batch)
    smem: SmemTensors
    pipelines: Pipelines
    band: Band
    heads_per_key: Int32


QUEUE_WARP = 2  # a thread of it takes the tiles of a dynamic kernel


def query_warp(config: ForwardConfig) -> int:
    """The producer warp that loads Q."""
    return 0 if config.scheduler is Scheduler.SINGLE else 1


def first_query_state() -> pipeline.PipelineState:
    """The producer at the only stage of Q."""
    return pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, 1)


def first_key_state(config: ForwardConfig) -> pipeline.PipelineState:
    """The producer at the first stage of K and of V."""
    return pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, config.stages_kv)


def key_share(config: ForwardConfig) -> tuple[int, int]:
    """(rows, head_dim) of the part of a K block that a CTA loads."""
    return config.tile_n // config.cluster_m, config.head_dim


def value_share(config: ForwardConfig) -> tuple[int, int]:
    """(head_dim_v, rows) of the part of a transposed V block that a CTA loads."""
    return config.head_dim_v, config.tile_n // config.cluster_m


@cute.jit
def loaded_keys(config: Constexpr[ForwardConfig], band: Band, tile: QueryTile):
    """The key blocks that come into a CTA's memory: those that a tile of its cluster sees."""
    keys = tile.keys
    if cutlass.const_expr(config.cluster_m > 1):
        keys = key_block_range(
            tile.m_block // config.cluster_m,
            tile.sequence.seqlens,
            band,
            config.queries * config.cluster_m,
            config.tile_n,
        )
    return keys


def loads_queries(config: ForwardConfig, tile: QueryTile) -> Any:
    """Whether Q is loaded for a tile: a single-tile CTA does without where no key is seen.

    Others hand its memory on from Q to O to the next Q, tile after tile.
    """
    if config.scheduler is not Scheduler.SINGLE:
        return True
    return tile.keys.begin < tile.keys.end


def queries_of(ctx: LoadContext, tile: QueryTile) -> tuple[cute.Tensor, cute.Tensor]:
    """Shared (TMA, 1) and global (TMA,) Q: of one head, or of all heads of a group."""
    config, sequence = ctx.config, tile.sequence
    rows = Rows(sequence.q.first, sequence.seqlens.q)
    if config.group > 1:
        gQ = cute.local_tile(
            tma.heads_rows(ctx.tma_Q, sequence.batch, rows, ctx.packed),
            (config.group, config.queries, config.head_dim),
            (tile.head, tile.m_block, 0),
        )
        return tma.partition(ctx.tma_Q, ctx.smem.sQ_box, gQ, tile_modes=3)
    gQ = cute.local_tile(
        tma.head_rows(ctx.tma_Q, tile.head, sequence.batch, rows, ctx.packed),
        (config.tile_m, config.head_dim),
        (tile.m_block, 0),
    )
    return tma.partition(ctx.tma_Q, ctx.smem.sQ, gQ)


@cute.jit
def load_queries(ctx: LoadContext, assigned: AssignedTile, state: pipeline.PipelineState):
    """Q of a tile. Runs in one whole warp; the TMA copies elect their own lane."""
    tile, ring = query_tile(assigned, ctx.band, ctx.heads_per_key, ctx.config), ctx.pipelines.Q
    tQsQ, tQgQ = queries_of(ctx, tile)
    if loads_queries(ctx.config, tile):
        ring.producer_acquire(state)
        barrier = ring.producer_get_barrier(state)
        cute.copy(ctx.tma_Q.atom, tQgQ, tQsQ[None, 0], tma_bar_ptr=barrier)
    state.advance()
    return state


@cute.jit
def load_keys(ctx: LoadContext, assigned: AssignedTile, state: pipeline.PipelineState):
    """K and V of a tile, block by block. Runs in one whole warp."""
    config = ctx.config
    tile = query_tile(assigned, ctx.band, ctx.heads_per_key, config)
    sequence, batch = tile.sequence, tile.sequence.batch
    keys = Rows(sequence.k.first, sequence.seqlens.k)
    ctas = config.cluster_m
    share, everyone = clusters.rank(ctas), clusters.everyone(ctas)
    gK = cute.local_tile(
        tma.head_rows(ctx.tma_K, tile.head_k, batch, keys, ctx.packed),
        key_share(config),
        (None, 0),
    )  # (share of tile_n, head_dim, shares of key blocks)
    gVt = cute.local_tile(
        tma.head_columns(ctx.tma_Vt, tile.head_k, batch, keys, ctx.packed),
        value_share(config),
        (0, None),
    )  # (head_dim_v, share of tile_n, shares of key blocks)
    sK = cute.local_tile(ctx.smem.sK, key_share(config), (share, 0, None))
    sVt = cute.local_tile(ctx.smem.sVt, value_share(config), (0, share, None))
    tKsK, tKgK = tma.partition(ctx.tma_K, sK, gK)
    tVsV, tVgV = tma.partition(ctx.tma_Vt, sVt, gVt)

    ring_K, ring_V = ctx.pipelines.K, ctx.pipelines.V
    blocks = loaded_keys(config, ctx.band, tile)
    for block in cutlass.range(blocks.end - blocks.begin, unroll=1):
        n_share = (blocks.end - 1 - block) * ctas + share
        ring_K.producer_acquire(state)
        cute.copy(
            ctx.tma_K.atom,
            tKgK[None, n_share],
            tKsK[None, state.index],
            tma_bar_ptr=ring_K.producer_get_barrier(state),
            mcast_mask=everyone,
        )
        ring_V.producer_acquire(state)
        cute.copy(
            ctx.tma_Vt.atom,
            tVgV[None, n_share],
            tVsV[None, state.index],
            tma_bar_ptr=ring_V.producer_get_barrier(state),
            mcast_mask=everyone,
        )
        state.advance()
    return state
