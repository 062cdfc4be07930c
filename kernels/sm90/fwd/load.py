"""The producer warp: Q once, then K and V blocks from the last to the first that is seen."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32, pipeline

from hopperflash.plan.config import ForwardConfig

from ...common.block_range import BlockRange
from ...common.sequence import AssignedTile, Rows
from .. import tma
from .storage import Pipelines, SmemTensors


@dataclass(frozen=True)
class LoadContext:
    """What the producer needs for one output tile."""

    config: Constexpr[ForwardConfig]
    packed: Constexpr[bool]
    tma_Q: tma.TmaTensor  # (seqlen_q, head_dim, heads_q, batch)
    tma_K: tma.TmaTensor  # (seqlen_k, head_dim, heads_k, batch)
    tma_Vt: tma.TmaTensor  # (head_dim_v, seqlen_k, heads_k, batch)
    smem: SmemTensors
    pipelines: Pipelines
    tile: AssignedTile
    head_k: Int32
    blocks: BlockRange


def query_tile(ctx: LoadContext) -> tuple[cute.Tensor, cute.Tensor]:
    """Shared (TMA, 1) and global (TMA,) Q: of one head, or of all heads of a group."""
    config, tile, sequence = ctx.config, ctx.tile, ctx.tile.sequence
    rows = Rows(sequence.q.first, sequence.seqlens.q)
    if config.group > 1:
        gQ = cute.local_tile(
            tma.heads_rows(ctx.tma_Q, sequence.batch, rows, ctx.packed),
            (config.group, config.queries, config.head_dim),
            (tile.head, tile.block, 0),
        )
        return tma.partition(ctx.tma_Q, ctx.smem.sQ_box, gQ, tile_modes=3)
    gQ = cute.local_tile(
        tma.head_rows(ctx.tma_Q, tile.head, sequence.batch, rows, ctx.packed),
        (config.tile_m, config.head_dim),
        (tile.block, 0),
    )
    return tma.partition(ctx.tma_Q, ctx.smem.sQ, gQ)


@cute.jit
def load(ctx: LoadContext):
    """Runs in one whole warp; the TMA copies elect their own lane."""
    config, blocks = ctx.config, ctx.blocks
    sequence, batch = ctx.tile.sequence, ctx.tile.sequence.batch
    keys = Rows(sequence.k.first, sequence.seqlens.k)
    gK = cute.local_tile(
        tma.head_rows(ctx.tma_K, ctx.head_k, batch, keys, ctx.packed),
        (config.tile_n, config.head_dim),
        (None, 0),
    )  # (tile_n, head_dim, key_blocks)
    gVt = cute.local_tile(
        tma.head_columns(ctx.tma_Vt, ctx.head_k, batch, keys, ctx.packed),
        (config.head_dim_v, config.tile_n),
        (0, None),
    )  # (head_dim_v, tile_n, key_blocks)
    tQsQ, tQgQ = query_tile(ctx)
    tKsK, tKgK = tma.partition(ctx.tma_K, ctx.smem.sK, gK)
    tVsV, tVgV = tma.partition(ctx.tma_Vt, ctx.smem.sVt, gVt)

    state_Q = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, 1)
    state_KV = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, config.stages_kv)
    ring_Q, ring_K, ring_V = ctx.pipelines

    if blocks.begin < blocks.end:
        ring_Q.producer_acquire(state_Q)
        cute.copy(
            ctx.tma_Q.atom, tQgQ, tQsQ[None, 0], tma_bar_ptr=ring_Q.producer_get_barrier(state_Q)
        )
    for block in cutlass.range(blocks.end - blocks.begin, unroll=1):
        n_block = blocks.end - 1 - block
        ring_K.producer_acquire(state_KV)
        cute.copy(
            ctx.tma_K.atom,
            tKgK[None, n_block],
            tKsK[None, state_KV.index],
            tma_bar_ptr=ring_K.producer_get_barrier(state_KV),
        )
        ring_V.producer_acquire(state_KV)
        cute.copy(
            ctx.tma_Vt.atom,
            tVgV[None, n_block],
            tVsV[None, state_KV.index],
            tma_bar_ptr=ring_V.producer_get_barrier(state_KV),
        )
        state_KV.advance()
