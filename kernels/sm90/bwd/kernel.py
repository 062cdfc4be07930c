"""The Hopper backward kernel: a CTA owns tiles of keys and values of one key head, one at a time.

It streams the query tiles that see its keys, of every query head of the group, so that dK and dV
are summed in registers and written once; dQ tiles are added up in fp32 in global memory.

Roles, in warpgroups of 128 threads, each of which walks over the CTA's key tiles by itself:
    warpgroup 0        warp 0 loads (`load`); of a CTA with several key tiles warp 1 loads K and V
    warpgroups 1..n    consumers: the five GEMMs (`mma`), additions to dQ (`add_dq`), then dK and dV
                       (`epilogue`)

Pipelines (full and empty mbarriers a stage), producer -> consumers:
    KV  1 stage      K and V, filled once a key tile, released when dK and dV, which take their
                     memory, have left
    Q   stages       Q, dO, LSE and delta of a query tile, released when dV and dK are complete

Named barriers: CONSUMERS (dS and shared P are written; they have been read), WARPGROUP (with
`query_rows` P is written), TURN (in order: this CTA may add to dQ).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, pipeline
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.memory import SmemAllocator

from hopperflash.plan.config import BackwardConfig, POperand, Scheduler

from ...common import operands, turns
from ...common.attention_kernel import AttentionKernel
from ...common.band import Band, Seqlens
from ...common.dependent import wait_for_previous
from ...common.softmax import Scales, make_scales
from ...common.tiles import key_tile
from ...common.work import (
    AssignedTile,
    Tiles,
    Walk,
    anew,
    first_tile,
    for_each_tile,
    grid,
    tile_number,
)
from .. import tma, wgmma
from ..clusters import leave, make_releases
from .add_dq import AddContext
from .context import MmaContext, TiledMmas
from .epilogue import EpilogueContext, epilogue
from .load import (
    LoadContext,
    first_key_state,
    first_query_state,
    key_warp,
    load_keys,
    load_queries,
    query_share,
)
from .mma import States, first_states, mma
from .storage import make_pipelines, smem_layouts, smem_tensors, storage_struct


class KernelOperands(NamedTuple):
    """The tensors as the kernel sees them."""

    tma_Q: tma.TmaTensor
    tma_K: tma.TmaTensor
    tma_V: tma.TmaTensor
    tma_dO: tma.TmaTensor
    tma_dK: tma.TmaTensor
    tma_dV: tma.TmaTensor
    mLSE: cute.Tensor  # (batch, heads_q, padded rows) fp32, base 2
    mDelta: cute.Tensor  # (batch, heads_q, padded rows) fp32
    mdQ: cute.Tensor  # (batch, heads_q, query blocks, tile_m head_dim) fp32, added to
    mTurn: cute.Tensor  # (batch, heads_q, query blocks) int32


@dataclass(frozen=True)
class ConsumerContext:
    """What a consumer warpgroup needs."""

    walk: Walk
    group: Int32  # query heads a key head
    mma: MmaContext
    add: Any  # AddContext, or None for a warpgroup that leaves dQ to others
    epilogue: EpilogueContext


class BackwardSm90(AttentionKernel[BackwardConfig]):
    """Gradients of exact attention for fp16 and bf16: any lengths, dense or packed, GQA."""

    kind = "bwd_sm90"
    fake_operands = staticmethod(operands.backward_operands)

    @cute.jit
    def __call__(  # noqa: PLR0913, PLR0917 - one tensor each is what a launch takes
        self,
        mQ: cute.Tensor,  # (batch, seqlen_q, heads_q, head_dim)
        mK: cute.Tensor,  # (batch, seqlen_k, heads_k, head_dim)
        mV: cute.Tensor,  # (batch, seqlen_k, heads_k, head_dim_v)
        mdO: cute.Tensor,  # (batch, seqlen_q, heads_q, head_dim_v)
        mLSE: cute.Tensor,  # (batch, heads_q, padded rows) LSE log2(e)
        mDelta: cute.Tensor,  # (batch, heads_q, padded rows)
        mdQ: cute.Tensor,  # (batch, heads_q, query blocks, tile_m head_dim) fp32, zeroed
        mTurn: cute.Tensor,  # (batch, heads_q, query blocks) int32, zeroed; deterministic only
        mdK: cute.Tensor,  # (batch, seqlen_k, heads_k, head_dim)
        mdV: cute.Tensor,  # (batch, seqlen_k, heads_k, head_dim_v)
        mTiles: Any,  # (tiles, fields) int32 of packed sequences, else None
        softmax_scale: Float32,
        softcap: Float32,
        window_left: Int32,
        window_right: Int32,
        max_ctas: Int32,  # of a kernel whose CTAs compute several tiles
        head_swizzle: Int32,  # heads whose tiles take turns
        stream: CUstream,
    ):
        config, dtype, packed = self.config, self.dtype, self.packed
        layouts = smem_layouts(config, dtype)
        n, d, dv = config.tile_n, config.head_dim, config.head_dim_v
        tma_operands = KernelOperands(
            tma_Q=self.query_atom(tma.sequence_major(mQ, packed), layouts.Q, d),
            tma_K=tma.load_atom(tma.sequence_major(mK, packed), layouts.K, (n, d)),
            tma_V=tma.load_atom(tma.sequence_major(mV, packed), layouts.V, (n, dv)),
            tma_dO=self.query_atom(tma.sequence_major(mdO, packed), layouts.dO, dv),
            tma_dK=tma.store_atom(tma.sequence_major(mdK, packed), layouts.K, (n, d)),
            tma_dV=tma.store_atom(tma.sequence_major(mdV, packed), layouts.V, (n, dv)),
            mLSE=mLSE,
            mDelta=mDelta,
            mdQ=mdQ,
            mTurn=mTurn,
        )
        batch, seqlen_k, heads_k, _ = mK.shape
        seqlen_q, heads_q = mQ.shape[1:3]
        tiles = Tiles(
            table=mTiles,
            # Whole clusters: of one that the last tile does not fill, a CTA only loads.
            blocks=cute.ceil_div(seqlen_k, n * config.cluster_n) * config.cluster_n,
            heads=heads_k,
            batch=batch,
            seqlens=Seqlens(q=seqlen_q, k=seqlen_k),
            head_swizzle=head_swizzle,
        )
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(
            tma_operands,
            tiles,
            heads_q // heads_k,
            make_scales(softmax_scale, softcap, self.capped),
            (window_left, window_right),
            TiledMmas(*self.tiled_mmas()),
        ).launch(
            grid=grid(tiles, config.scheduler, max_ctas),
            block=(config.threads, 1, 1),
            cluster=(config.cluster_n, 1, 1),
            # Tells ptxas the registers at entry, without which it may drop setmaxnreg.
            min_blocks_per_mp=1,
            use_pdl=self.dependent,
            stream=stream,
        )

    def query_atom(
        self, mX: cute.Tensor, layout: cute.ComposedLayout, head_dim: int
    ) -> tma.TmaTensor:
        """How a CTA's share of the rows of Q or dO comes into all of its cluster."""
        share, multicast = query_share(self.config, head_dim), self.config.cluster_n > 1
        return tma.load_atom(mX, wgmma.row_slice(layout, share), share, multicast)

    def tiled_mmas(self) -> tuple[cute.TiledMma, ...]:
        """The tiled MMAs of S (and dP), dV, dK and dQ."""
        config, dtype = self.config, self.dtype
        k_major, mn_major = OperandMajorMode.K, OperandMajorMode.MN
        smem, rmem = warpgroup.OperandSource.SMEM, warpgroup.OperandSource.RMEM
        p_source = rmem if config.p_operand is POperand.REGISTERS else smem

        def with_keys(
            other: int, a_source: warpgroup.OperandSource, other_major: OperandMajorMode
        ) -> cute.TiledMma:
            a_major, b_major = config.oriented(k_major, other_major)
            return wgmma.tiled_mma(
                dtype,
                config.oriented(config.tile_n, other),
                a_source,
                b_major,
                a_major=a_major,
                column_warpgroups=config.column_shares,
                row_warpgroups=config.row_warpgroups,
            )

        return (
            with_keys(config.tile_m, smem, k_major),
            with_keys(config.head_dim_v, p_source, mn_major),
            with_keys(config.head_dim, p_source, mn_major),
            wgmma.tiled_mma(
                dtype,
                config.dq_tile,
                smem,
                mn_major,
                a_major=mn_major,
                column_warpgroups=config.query_shares,
            ),
        )

    @cute.kernel
    def kernel(
        self,
        tensors: KernelOperands,
        tiles: Tiles,
        group: Int32,  # query heads a key head
        scales: Scales,
        window: tuple[Int32, Int32],
        mmas: TiledMmas,
    ):
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_idx == 0:
            for tma_X in tensors[:6]:
                cpasync.prefetch_descriptor(tma_X.atom)
        wait_for_previous(self.dependent)
        band = self.band(*window)
        descending = turns.in_descending_order(band.kind, self.config.deterministic)
        swizzled = turns.heads_take_turns(band.kind, self.config.deterministic)
        walk = self.walk(tiles, descending=descending, swizzled=swizzled)
        if cutlass.const_expr(self.packed):
            # Nothing is set up where there is nothing to do.
            if first_tile(walk).block >= 0:
                self.run_roles(tensors, walk, group, band, scales, mmas)
        else:
            self.run_roles(tensors, walk, group, band, scales, mmas)

    @cute.jit
    def run_roles(
        self,
        tensors: KernelOperands,
        walk: Walk,
        group: Int32,
        band: Band,
        scales: Scales,
        mmas: TiledMmas,
    ):
        """All tiles of this CTA, each warp in its role."""
        config, dtype = self.config, self.dtype
        tidx, _, _ = cute.arch.thread_idx()
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        layouts = smem_layouts(config, dtype)
        storage = SmemAllocator().allocate(storage_struct(config, layouts, dtype))
        smem = smem_tensors(storage, config, layouts)
        pipelines = make_pipelines(storage, config, layouts, dtype)
        # A CTA loads into all of its cluster, whose barriers must be there.
        pipeline.pipeline_init_arrive(cluster_shape_mn=(config.cluster_n, 1), is_relaxed=True)
        pipeline.pipeline_init_wait(cluster_shape_mn=(config.cluster_n, 1))

        if warp_idx < wgmma.THREADS_PER_WARPGROUP // cute.arch.WARP_SIZE:
            cute.arch.setmaxregister_decrease(config.registers_producer)
            producer = LoadContext(
                config=config,
                packed=self.packed,
                tma_Q=tensors.tma_Q,
                tma_K=tensors.tma_K,
                tma_V=tensors.tma_V,
                tma_dO=tensors.tma_dO,
                mLSE=tensors.mLSE,
                mDelta=tensors.mDelta,
                smem=smem,
                pipelines=pipelines,
                band=band,
                group=group,
            )
            if warp_idx == key_warp(config):
                for_each_tile(walk, load_keys, producer, first_key_state())
            if warp_idx == 0:
                for_each_tile(walk, load_queries, producer, first_query_state(config))
        else:
            cute.arch.setmaxregister_increase(config.registers_consumer)
            consumer_tidx = tidx - wgmma.THREADS_PER_WARPGROUP
            consumer = ConsumerContext(
                walk=walk,
                group=group,
                mma=MmaContext(
                    config=config,
                    band=band,
                    capped=self.capped,
                    mmas=mmas,
                    smem=smem,
                    pipelines=pipelines,
                    releases=make_releases(storage.barriers_Q, config.cluster_n, tidx),
                    consumer_tidx=consumer_tidx,
                    scales=scales,
                ),
                add=AddContext(config, (), band, tensors.mdQ, tensors.mTurn, consumer_tidx),
                epilogue=EpilogueContext(
                    config=config,
                    packed=self.packed,
                    mask_kind=band.kind,
                    mmas=mmas,
                    smem=smem,
                    tma_dK=tensors.tma_dK,
                    tma_dV=tensors.tma_dV,
                    consumer_tidx=consumer_tidx,
                    softmax_scale=scales.softmax,
                ),
            )
            if cutlass.const_expr(config.dq_alike):
                for_each_tile(walk, compute, that_adds(consumer, 0), first_states(config))
            elif consumer_tidx < wgmma.THREADS_PER_WARPGROUP:
                for_each_tile(walk, compute, that_adds(consumer, 0), first_states(config))
            else:
                for_each_tile(walk, compute, that_adds(consumer, 1), first_states(config))
        leave(config.cluster_n)


def that_adds(ctx: ConsumerContext, warpgroup: int) -> ConsumerContext:
    """What one of the warpgroups needs, which may leave dQ to others."""
    parts = ctx.mma.config.dq_parts(warpgroup)
    return replace(ctx, add=replace(ctx.add, parts=parts) if parts else None)


@cute.jit
def compute(ctx: ConsumerContext, assigned: AssignedTile, states: States):
    """A consumer warpgroup's part of a key tile: GEMMs per query tile, then dK and dV."""
    config, ring_KV = ctx.mma.config, ctx.mma.pipelines.KV
    consumer_tidx = ctx.mma.consumer_tidx
    if cutlass.const_expr(config.scheduler is Scheduler.PERSISTENT):
        consumer_tidx = anew(consumer_tidx)
    mma_context = replace(ctx.mma, consumer_tidx=consumer_tidx)
    add_context = None
    if cutlass.const_expr(ctx.add is not None):
        add_context = replace(ctx.add, consumer_tidx=consumer_tidx)
    acc_dK, acc_dV, states = mma(mma_context, add_context, key_tile_of(ctx, assigned), states)
    # Asked for anew, so that it is not live in the loop over query tiles.
    finished = key_tile_of(ctx, tile_number(ctx.walk, assigned.number))
    epilogue_context = replace(ctx.epilogue, consumer_tidx=consumer_tidx)
    epilogue(epilogue_context, finished, acc_dK, acc_dV)
    if cutlass.const_expr(config.scheduler is Scheduler.PERSISTENT):
        # The warp that stored dK and dV has waited until they were read: the next K and V may come.
        ring_KV.consumer_release(states.KV)
        states.KV.advance()
    return states


@cute.jit
def key_tile_of(ctx: ConsumerContext, assigned: AssignedTile):
    """An assignment as the consumers see it."""
    return key_tile(assigned, ctx.mma.band, ctx.group, ctx.mma.config, ctx.epilogue.packed)
