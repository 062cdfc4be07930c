"""The Hopper forward kernel: a CTA computes tiles of query rows of one head, one or several.

Roles, in warpgroups of 128 threads, each of which walks over the CTA's tiles by itself:
    warpgroup 0        producer: its first warp streams Q, K and V by TMA (`load`); of a CTA with
                       several tiles the second warp takes Q, and a thread of the third the next
                       tile if nobody knows it beforehand
    warpgroups 1..n    consumers: 64 query rows each, both GEMMs and the softmax (`mma`), then the
                       output (`epilogue`)

Pipelines (full and empty mbarriers a stage), producer -> consumers:
    Q  1 stage          filled once a tile, released when O, which takes its memory, has left
    K  stages_kv        released when S = Q K^T is complete
    V  stages_kv        released when O += P V is complete

Timeline of a tile with two stages, key blocks j = n-1 .. 0:
    load    Q K(n-1) V(n-1) K(n-2) V(n-2) | K(n-3) waits for S(n-1) | V(n-3) for PV(n-1) | ...
    mma     S(n-1), softmax | S(j) and PV(j+1) in flight, mask on the boundary, softmax(j) | PV(0)

K and V of the next tile arrive while O of this one is normalised and stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, pipeline
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.memory import SmemAllocator

from hopperflash.plan.config import ForwardConfig, POperand, Scheduler

from ...common import operands
from ...common.attention_kernel import AttentionKernel
from ...common.band import Band, Seqlens
from ...common.dependent import wait_for_previous
from ...common.softmax import Scales, make_scales
from ...common.tiles import query_tile
from ...common.work import (
    AssignedTile,
    Tiles,
    Walk,
    first_tile,
    for_each_tile,
    grid,
    take_tiles,
    with_queue,
)
from .. import tma, wgmma
from ..clusters import leave, make_releases
from .epilogue import EpilogueContext, epilogue
from .load import (
    QUEUE_WARP,
    LoadContext,
    first_key_state,
    first_query_state,
    key_share,
    load_keys,
    load_queries,
    query_warp,
    value_share,
)
from .mma import MmaContext, States, begin_turns, first_states, make_turns, mma
from .storage import (
    SmemLayouts,
    make_pipelines,
    make_queue,
    rows_of_O_are_rows_of_Q,
    smem_layouts,
    smem_tensors,
    storage_struct,
)


class KernelOperands(NamedTuple):
    """The tensors as the kernel sees them."""

    tma_Q: tma.TmaTensor
    tma_K: tma.TmaTensor
    tma_Vt: tma.TmaTensor
    tma_O: tma.TmaTensor
    mLSE: cute.Tensor  # (batch, heads_q, seqlen_q) fp32


@dataclass(frozen=True)
class ConsumerContext:
    """What a consumer warpgroup needs."""

    band: Band
    heads_per_key: Int32
    mma: MmaContext
    epilogue: EpilogueContext


class ForwardSm90(AttentionKernel[ForwardConfig]):
    """Exact attention forward for fp16 and bf16: dense or packed, GQA by head index."""

    kind = "fwd_sm90"
    fake_operands = staticmethod(operands.forward_operands)

    def fake_arguments(self) -> tuple[Any, ...]:
        """The common ones, with the counter of a dynamic kernel before the scalars."""
        dynamic = self.config.scheduler is Scheduler.DYNAMIC
        tensors = operands.forward_operands(self.signature)
        return (*tensors, operands.integers(1) if dynamic else None, *operands.scalars())

    @cute.jit
    def __call__(  # noqa: PLR0913, PLR0917 - one tensor each is what a launch takes
        self,
        mQ: cute.Tensor,  # (batch, seqlen_q, heads_q, head_dim)
        mK: cute.Tensor,  # (batch, seqlen_k, heads_k, head_dim)
        mV: cute.Tensor,  # (batch, seqlen_k, heads_k, head_dim_v)
        mO: cute.Tensor,  # (batch, seqlen_q, heads_q, head_dim_v)
        mLSE: cute.Tensor,  # (batch, heads_q, seqlen_q)
        mTiles: Any,  # (tiles, fields) int32 of packed sequences, else None
        mTaken: Any,  # (1,) int32, zeroed, of a dynamic kernel, else None
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
        p_source = (
            warpgroup.OperandSource.RMEM
            if config.p_operand is POperand.REGISTERS
            else warpgroup.OperandSource.SMEM
        )
        mma_S = wgmma.tiled_mma(
            dtype,
            (config.tile_m, config.tile_n),
            warpgroup.OperandSource.SMEM,
            OperandMajorMode.K,
        )
        mma_O = wgmma.tiled_mma(
            dtype, (config.tile_m, config.head_dim_v), p_source, OperandMajorMode.MN
        )
        tma_Q, tma_O = self.query_atoms(mQ, mO, layouts)
        kernel_operands = KernelOperands(
            tma_Q=tma_Q,
            tma_K=self.key_atom(tma.sequence_major(mK, packed), layouts.K, key_share(config)),
            tma_Vt=self.key_atom(tma.feature_major(mV, packed), layouts.Vt, value_share(config)),
            tma_O=tma_O,
            mLSE=mLSE,
        )
        batch, seqlen_q, heads_q, _ = mQ.shape
        seqlen_k, heads_k = mK.shape[1:3]
        tiles = Tiles(
            table=mTiles,
            # Whole clusters: of one that the last tile does not fill, a CTA only loads.
            blocks=cute.ceil_div(seqlen_q, config.queries * config.cluster_m) * config.cluster_m,
            heads=heads_q // config.group,
            batch=batch,
            seqlens=Seqlens(q=seqlen_q, k=seqlen_k),
            head_swizzle=head_swizzle,
        )
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(
            kernel_operands,
            tiles,
            mTaken,
            tiles.heads // heads_k,
            make_scales(softmax_scale, softcap, self.capped),
            (window_left, window_right),
            mma_S,
            mma_O,
        ).launch(
            grid=grid(tiles, config.scheduler, max_ctas),
            block=(config.threads, 1, 1),
            cluster=(config.cluster_m, 1, 1),
            # Tells ptxas the registers at entry, without which it may drop setmaxnreg.
            min_blocks_per_mp=1,
            use_pdl=self.dependent,
            stream=stream,
        )

    def query_atoms(
        self, mQ: cute.Tensor, mO: cute.Tensor, layouts: SmemLayouts
    ) -> tuple[tma.TmaTensor, tma.TmaTensor]:
        """How Q comes and O goes: a tile of one head, O by warpgroups; or the heads of a group."""
        config = self.config
        if config.group > 1:
            box = (config.group, config.queries)
            return (
                tma.load_atom(
                    tma.head_major(mQ, self.packed),
                    cute.select(layouts.Q_box, mode=[0, 1, 2]),
                    (*box, config.head_dim),
                ),
                tma.store_atom(
                    tma.head_major(mO, self.packed),
                    cute.select(layouts.O_box, mode=[0, 1, 2]),
                    (*box, config.head_dim_v),
                ),
            )
        rows_of_warpgroup = (wgmma.ROWS_PER_WARPGROUP, config.head_dim_v)
        return (
            tma.load_atom(
                tma.sequence_major(mQ, self.packed), layouts.Q, (config.tile_m, config.head_dim)
            ),
            tma.store_atom(
                tma.sequence_major(mO, self.packed),
                wgmma.row_slice(layouts.O, rows_of_warpgroup),
                rows_of_warpgroup,
            ),
        )

    def key_atom(
        self, mX: cute.Tensor, layout: cute.ComposedLayout, share: tuple[int, int]
    ) -> tma.TmaTensor:
        """How a CTA's share of the rows of K or V comes into all of its cluster."""
        multicast = self.config.cluster_m > 1
        return tma.load_atom(mX, wgmma.row_slice(layout, share), share, multicast)

    @cute.kernel
    def kernel(
        self,
        tensors: KernelOperands,
        tiles: Tiles,
        mTaken: Any,  # (1,) tiles of a dynamic kernel that have been taken
        heads_per_key: Int32,  # tiles' heads a key head
        scales: Scales,
        window: tuple[Int32, Int32],
        mma_S: cute.TiledMma,
        mma_O: cute.TiledMma,
    ):
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_idx == 0:
            for tma_X in tensors[:4]:
                cpasync.prefetch_descriptor(tma_X.atom)
        wait_for_previous(self.dependent)
        band = self.band(*window, self.config.group)
        # Causal tiles near the end see the most keys: start them first.
        walk = self.walk(tiles, descending=band.causal, swizzled=band.causal)
        context = (tensors, mTaken, walk, heads_per_key, band, scales, mma_S, mma_O)
        if cutlass.const_expr(self.packed):
            # Nothing is set up where there is nothing to do.
            if first_tile(walk).block >= 0:
                self.run_roles(*context)
        else:
            self.run_roles(*context)

    @cute.jit
    def run_roles(
        self,
        tensors: KernelOperands,
        mTaken: Any,
        walk: Walk,
        heads_per_key: Int32,
        band: Band,
        scales: Scales,
        mma_S: cute.TiledMma,
        mma_O: cute.TiledMma,
    ):
        """All tiles of this CTA, each warp in its role."""
        config, dtype = self.config, self.dtype
        tidx, _, _ = cute.arch.thread_idx()
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        layouts = smem_layouts(config, dtype)
        storage = SmemAllocator().allocate(storage_struct(config, layouts, dtype))
        smem = smem_tensors(storage, layouts)
        pipelines = make_pipelines(storage, config, layouts, dtype)
        if cutlass.const_expr(config.scheduler is Scheduler.DYNAMIC):
            walk = with_queue(walk, make_queue(storage, config))
        # A CTA loads into all of its cluster, whose barriers must be there.
        pipeline.pipeline_init_arrive(cluster_shape_mn=(config.cluster_m, 1), is_relaxed=True)
        pipeline.pipeline_init_wait(cluster_shape_mn=(config.cluster_m, 1))

        if warp_idx < wgmma.THREADS_PER_WARPGROUP // cute.arch.WARP_SIZE:
            cute.arch.setmaxregister_decrease(config.registers_producer)
            producer = LoadContext(
                config=config,
                packed=self.packed,
                tma_Q=tensors.tma_Q,
                tma_K=tensors.tma_K,
                tma_Vt=tensors.tma_Vt,
                smem=smem,
                pipelines=pipelines,
                band=band,
                heads_per_key=heads_per_key,
            )
            if warp_idx == query_warp(config):
                for_each_tile(walk, load_queries, producer, first_query_state())
            if warp_idx == 0:
                for_each_tile(walk, load_keys, producer, first_key_state(config))
            if cutlass.const_expr(config.scheduler is Scheduler.DYNAMIC):
                if warp_idx == QUEUE_WARP:
                    with cute.arch.elect_one():
                        take_tiles(walk, mTaken)
        else:
            cute.arch.setmaxregister_increase(config.registers_consumer)
            consumer_tidx = tidx - wgmma.THREADS_PER_WARPGROUP
            consumer = ConsumerContext(
                band=band,
                heads_per_key=heads_per_key,
                mma=MmaContext(
                    config=config,
                    band=band,
                    capped=self.capped,
                    mma_S=mma_S,
                    mma_O=mma_O,
                    smem=smem,
                    pipelines=pipelines,
                    releases=make_releases(storage.barriers_Q, config.cluster_m, tidx),
                    consumer_tidx=consumer_tidx,
                    scales=scales,
                    turns=make_turns(config, consumer_tidx),
                ),
                epilogue=EpilogueContext(
                    config=config,
                    packed=self.packed,
                    own_rows=rows_of_O_are_rows_of_Q(config, dtype),
                    mma_O=mma_O,
                    smem=smem,
                    tma_O=tensors.tma_O,
                    mLSE=tensors.mLSE,
                    consumer_tidx=consumer_tidx,
                ),
            )
            if cutlass.const_expr(config.ping_pong):
                begin_turns(consumer.mma)
            for_each_tile(walk, compute, consumer, first_states(config))
        leave(config.cluster_m)


@cute.jit
def compute(ctx: ConsumerContext, assigned: AssignedTile, states: States):
    """A consumer warpgroup's rows of a tile."""
    config, ring_Q = ctx.mma.config, ctx.mma.pipelines.Q
    tile = query_tile(assigned, ctx.band, ctx.heads_per_key, config)
    acc_O, stats, states = mma(ctx.mma, tile, states)
    epilogue(ctx.epilogue, tile, acc_O, stats)
    if cutlass.const_expr(config.scheduler is not Scheduler.SINGLE):
        # The warp that stored O has waited until it was read: the next Q may take its place.
        ring_Q.consumer_release(states.Q)
        states.Q.advance()
    return states
