"""The producers: K and V of a key tile, and Q, dO, LSE and delta, query tile by query tile.

A persistent CTA has a warp for each, since K and V of the next key tile must wait until dK and dV
of this one have left their memory, which Q and dO need not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32, pipeline
from cutlass.cute.nvgpu import cpasync

from hopperflash.plan.config import BackwardConfig, Scheduler

from ...common.band import Band
from ...common.block_range import query_block_range
from ...common.sequence import Rows
from ...common.tiles import KeyTile, key_tile
from ...common.work import AssignedTile
from .. import clusters, tma
from .storage import Pipelines, SmemTensors


@dataclass(frozen=True)
class LoadContext:
    """What the producers need."""

    config: Constexpr[BackwardConfig]
    packed: Constexpr[bool]
    tma_Q: tma.TmaTensor  # (seqlen_q, head_dim, heads_q, batch)
    tma_K: tma.TmaTensor  # (seqlen_k, head_dim, heads_k, batch)
    tma_V: tma.TmaTensor  # (seqlen_k, head_dim_v, heads_k, batch)
    tma_dO: tma.TmaTensor  # (seqlen_q, head_dim_v, heads_q, batch)
    mLSE: cute.Tensor  # (batch, heads_q, padded rows) fp32, base 2
    mDelta: cute.Tensor  # (batch, heads_q, padded rows) fp32
    smem: SmemTensors
    pipelines: Pipelines
    band: Band
    group: Int32  # query heads a key head


def key_warp(config: BackwardConfig) -> int:
    """The producer warp that loads K and V; number 0 loads Q and dO."""
    return 1 if config.scheduler is Scheduler.PERSISTENT else 0


def first_key_state() -> pipeline.PipelineState:
    """The producer at the only stage of K and V."""
    return pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, 1)


def first_query_state(config: BackwardConfig) -> pipeline.PipelineState:
    """The producer at the first stage of Q."""
    return pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, config.stages)


def loads_keys(config: BackwardConfig, tile: KeyTile) -> Any:
    """Whether K and V are loaded for a tile: a single-tile CTA does without where nobody sees them.

    A persistent one hands their memory on to dK and dV and to the next K and V, tile after tile.
    """
    if config.scheduler is Scheduler.PERSISTENT:
        return True
    return tile.queries.begin < tile.queries.end


def query_share(config: BackwardConfig, head_dim: int) -> tuple[int, int]:
    """(rows, columns) of the part of a block of Q or dO that a CTA loads."""
    return config.tile_m // config.cluster_n, head_dim


@cute.jit
def loaded_queries(config: Constexpr[BackwardConfig], band: Band, tile: KeyTile):
    """The query blocks that come into a CTA's memory: those that see a tile of its cluster."""
    queries = tile.queries
    if cutlass.const_expr(config.cluster_n > 1):
        queries = query_block_range(
            tile.n_block // config.cluster_n,
            tile.sequence.seqlens,
            band,
            config.tile_m,
            config.tile_n * config.cluster_n,
        )
    return queries


@cute.jit
def load_keys(ctx: LoadContext, assigned: AssignedTile, state: pipeline.PipelineState):
    """K and V of a key tile, on one barrier. Runs in one whole warp; the TMA copies elect their own
    lane."""
    config, ring = ctx.config, ctx.pipelines.KV
    tile = key_tile(assigned, ctx.band, ctx.group, config, ctx.packed)
    sequence = tile.sequence
    keys = Rows(sequence.k.first, sequence.seqlens.k)
    gK = cute.local_tile(
        tma.head_rows(ctx.tma_K, tile.head_k, sequence.batch, keys, ctx.packed),
        (config.tile_n, config.head_dim),
        (tile.n_block, 0),
    )
    gV = cute.local_tile(
        tma.head_rows(ctx.tma_V, tile.head_k, sequence.batch, keys, ctx.packed),
        (config.tile_n, config.head_dim_v),
        (tile.n_block, 0),
    )
    tKsK, tKgK = tma.partition(ctx.tma_K, ctx.smem.sK, gK)
    tVsV, tVgV = tma.partition(ctx.tma_V, ctx.smem.sV, gV)
    if loads_keys(config, tile):
        ring.producer_acquire(state)
        barrier = ring.producer_get_barrier(state)
        cute.copy(ctx.tma_K.atom, tKgK, tKsK[None, 0], tma_bar_ptr=barrier)
        cute.copy(ctx.tma_V.atom, tVgV, tVsV[None, 0], tma_bar_ptr=barrier)
    state.advance()
    return state


@cute.jit
def load_queries(ctx: LoadContext, assigned: AssignedTile, state: pipeline.PipelineState):
    """Q, LSE, dO and delta of all query tiles of a key tile. Runs in one whole warp."""
    tile = key_tile(assigned, ctx.band, ctx.group, ctx.config, ctx.packed)
    for g in cutlass.range(tile.group, unroll=1):
        state = load_head(ctx, tile, tile.head_k * tile.group + g, state)
    return state


@cute.jit
def load_head(ctx: LoadContext, tile: KeyTile, head: Int32, state: pipeline.PipelineState):
    """Q, LSE, dO and delta of the query tiles of one head, on one barrier a tile."""
    config, sequence, ring = ctx.config, tile.sequence, ctx.pipelines.Q
    queries = Rows(sequence.q.first, sequence.seqlens.q)
    ctas = config.cluster_n
    share, everyone = clusters.rank(ctas), clusters.everyone(ctas)
    share_Q, share_dO = (query_share(config, d) for d in (config.head_dim, config.head_dim_v))
    gQ = cute.local_tile(
        tma.head_rows(ctx.tma_Q, head, sequence.batch, queries, ctx.packed), share_Q, (None, 0)
    )  # (share of tile_m, head_dim, shares of query blocks)
    gdO = cute.local_tile(
        tma.head_rows(ctx.tma_dO, head, sequence.batch, queries, ctx.packed), share_dO, (None, 0)
    )  # (share of tile_m, head_dim_v, shares of query blocks)
    sQ = cute.local_tile(ctx.smem.sQ, share_Q, (share, 0, None))
    sdO = cute.local_tile(ctx.smem.sdO, share_dO, (share, 0, None))
    gLSE = cute.local_tile(ctx.mLSE[sequence.batch, head, None], (config.tile_m,), (None,))
    gDelta = cute.local_tile(ctx.mDelta[sequence.batch, head, None], (config.tile_m,), (None,))
    tQsQ, tQgQ = tma.partition(ctx.tma_Q, sQ, gQ)
    tdOsdO, tdOgdO = tma.partition(ctx.tma_dO, sdO, gdO)
    blocks = loaded_queries(config, ctx.band, tile)
    for m_block in cutlass.range(blocks.begin, blocks.end, unroll=1):
        ring.producer_acquire(state)
        barrier, stage = ring.producer_get_barrier(state), state.index
        m_share, padded_block = m_block * ctas + share, tile.first_padded_block + m_block
        cute.copy(
            ctx.tma_Q.atom,
            tQgQ[None, m_share],
            tQsQ[None, stage],
            tma_bar_ptr=barrier,
            mcast_mask=everyone,
        )
        copy_statistic(gLSE[None, padded_block], ctx.smem.sLSE[None, stage], barrier)
        cute.copy(
            ctx.tma_dO.atom,
            tdOgdO[None, m_share],
            tdOsdO[None, stage],
            tma_bar_ptr=barrier,
            mcast_mask=everyone,
        )
        copy_statistic(gDelta[None, padded_block], ctx.smem.sDelta[None, stage], barrier)
        state.advance()
    return state


@cute.jit
def copy_statistic(gX: cute.Tensor, sX: cute.Tensor, barrier: cute.Pointer):
    """A tile's row statistic, by one bulk copy."""
    atom = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), cutlass.Float32)
    with cute.arch.elect_one():
        cute.copy(atom, gX, sX, mbar_ptr=barrier)
