"""Shared memory of the Hopper forward: operand layouts, storage struct, pipelines."""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import pipeline
from cutlass.cute.nvgpu import OperandMajorMode

from hopperflash.plan.config import ForwardConfig, POperand, Scheduler

from ...common.work import TileQueue
from .. import wgmma

_ALIGNMENT = 1024  # a 128-byte swizzle repeats every 8 rows of 128 bytes
_WARPS_PER_WARPGROUP = 4
_LOADING_WARPS = 2  # of a CTA with several tiles: Q, and K with V


class Barrier(IntEnum):
    """Named barriers; 0 belongs to __syncthreads. Of the latter two each warpgroup has one."""

    CONSUMERS = 1  # all consumer warps
    WARPGROUP = 2  # all warps of one: its rows of O are in shared memory
    TURN = 5  # one and the one before it: that has issued its GEMMs


@dataclass(frozen=True)
class SmemLayouts:
    """Staged layouts: Q and O share memory, V is transposed, P exists only as a shared operand."""

    Q: Any  # (tile_m, head_dim, 1)
    K: Any  # (tile_n, head_dim, stages)
    Vt: Any  # (head_dim_v, tile_n, stages)
    O: Any  # (tile_m, head_dim_v, 1)  # noqa: E741
    Q_box: Any  # of several heads (heads, queries, head_dim, 1), else Q
    O_box: Any  # of several heads (heads, queries, head_dim_v, 1), else O
    P: Any  # (tile_m, tile_n, 1) or None


class SmemTensors(NamedTuple):
    """The operands in shared memory."""

    sQ: cute.Tensor  # (tile_m, head_dim, 1)
    sQ_box: cute.Tensor  # the part that TMA fills: of several heads (heads, queries, head_dim, 1)
    sK: cute.Tensor
    sVt: cute.Tensor
    sO: cute.Tensor  # (tile_m, head_dim_v, 1)
    sO_box: cute.Tensor  # the part that TMA stores, likewise
    sP: Any  # cute.Tensor or None


class Pipelines(NamedTuple):
    """Full/empty mbarrier rings from the producer warp to the consumer warpgroups."""

    Q: pipeline.PipelineTmaAsync
    K: pipeline.PipelineTmaAsync
    V: pipeline.PipelineTmaAsync


def smem_layouts(config: ForwardConfig, dtype: type[cutlass.Numeric]) -> SmemLayouts:
    """Layouts of one CTA's tiles for 16-bit operands."""
    k_major, mn_major = OperandMajorMode.K, OperandMajorMode.MN
    stages = config.stages_kv
    shared_P = config.p_operand is POperand.SHARED
    Q = wgmma.smem_layout(dtype, (config.tile_m, config.head_dim), 1, k_major)
    O = wgmma.smem_layout(dtype, (config.tile_m, config.head_dim_v), 1, k_major)  # noqa: E741

    def box(layout: Any) -> Any:
        grouped = config.group > 1
        return wgmma.heads_view(layout, config.group, config.queries) if grouped else layout

    return SmemLayouts(
        Q=Q,
        K=wgmma.smem_layout(dtype, (config.tile_n, config.head_dim), stages, k_major),
        Vt=wgmma.smem_layout(dtype, (config.head_dim_v, config.tile_n), stages, mn_major),
        O=O,
        Q_box=box(Q),
        O_box=box(O),
        P=wgmma.smem_layout(dtype, (config.tile_m, config.tile_n), 1, k_major)
        if shared_P
        else None,
    )


def rows_of_O_are_rows_of_Q(config: ForwardConfig, dtype: type[cutlass.Numeric]) -> bool:
    """Whether a warpgroup's rows of O lie in the memory of its own rows of Q alone.

    Tiles stack swizzle atoms along the rows first, so equal atoms put equal rows in equal places.
    """
    k_major = OperandMajorMode.K
    kind_Q = wgmma.swizzle_kind(dtype, config.head_dim, k_major)
    return kind_Q is wgmma.swizzle_kind(dtype, config.head_dim_v, k_major)


def storage_struct(
    config: ForwardConfig, layouts: SmemLayouts, dtype: type[cutlass.Numeric]
) -> type:
    """The CTA's shared memory; `hopperflash.plan.budget` does the same arithmetic on the host."""
    cosize_QO = max(cute.cosize(layouts.Q), cute.cosize(layouts.O))
    cosize_P = 0 if layouts.P is None else cute.cosize(layouts.P)
    queues = 1 if config.scheduler is Scheduler.DYNAMIC else 0

    @cute.struct
    class SharedStorage:
        barriers_Q: cute.struct.MemRange[cutlass.Int64, 2]
        barriers_K: cute.struct.MemRange[cutlass.Int64, 2 * config.stages_kv]
        barriers_V: cute.struct.MemRange[cutlass.Int64, 2 * config.stages_kv]
        barriers_next: cute.struct.MemRange[cutlass.Int64, 2 * queues]
        sNext: cute.struct.MemRange[cutlass.Int32, queues]
        sQO: cute.struct.Align[cute.struct.MemRange[dtype, cosize_QO], _ALIGNMENT]
        sK: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.K)], _ALIGNMENT]
        sV: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.Vt)], _ALIGNMENT]
        sP: cute.struct.Align[cute.struct.MemRange[dtype, cosize_P], _ALIGNMENT]

    return SharedStorage


def smem_tensors(storage: Any, layouts: SmemLayouts) -> SmemTensors:
    """Typed views of the storage; the swizzle travels in the pointer, as wgmma and TMA need it."""

    def view(memory: Any, layout: Any) -> cute.Tensor:
        return memory.get_tensor(layout.outer, swizzle=layout.inner)

    return SmemTensors(
        sQ=view(storage.sQO, layouts.Q),
        sQ_box=view(storage.sQO, layouts.Q_box),
        sK=view(storage.sK, layouts.K),
        sVt=view(storage.sV, layouts.Vt),
        sO=view(storage.sQO, layouts.O),
        sO_box=view(storage.sQO, layouts.O_box),
        sP=None if layouts.P is None else view(storage.sP, layouts.P),
    )


def make_pipelines(
    storage: Any, config: ForwardConfig, layouts: SmemLayouts, dtype: type[cutlass.Numeric]
) -> Pipelines:
    """One elected producer thread arrives with the bytes, whoever loads them; each consumer warp
    releases once in every CTA that has a share in them."""
    producer = pipeline.CooperativeGroup(pipeline.Agent.Thread)

    def ring(barriers: Any, layout: Any, stages: int, ctas: int) -> pipeline.PipelineTmaAsync:
        tile_modes = list(range(cute.rank(layout) - 1))
        warps = config.consumer_warpgroups * _WARPS_PER_WARPGROUP
        consumers = pipeline.CooperativeGroup(pipeline.Agent.Thread, ctas * warps)
        return pipeline.PipelineTmaAsync.create(
            barrier_storage=barriers.data_ptr(),
            num_stages=stages,
            producer_group=producer,
            consumer_group=consumers,
            tx_count=cute.size(cute.select(layout, mode=tile_modes)) * dtype.width // 8,
            cta_layout_vmnk=cute.make_layout((1, 1, ctas, 1)),
            defer_sync=True,
        )

    return Pipelines(
        Q=ring(storage.barriers_Q, layouts.Q_box, 1, 1),
        K=ring(storage.barriers_K, layouts.K, config.stages_kv, config.cluster_m),
        V=ring(storage.barriers_V, layouts.Vt, config.stages_kv, config.cluster_m),
    )


def make_queue(storage: Any, config: ForwardConfig) -> TileQueue:
    """From the thread that takes tiles to the warps that load and compute, once each."""
    readers = _LOADING_WARPS + config.consumer_warpgroups * _WARPS_PER_WARPGROUP
    ring = pipeline.PipelineAsync.create(
        barrier_storage=storage.barriers_next.data_ptr(),
        num_stages=1,
        producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
        consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, readers),
        defer_sync=True,
    )
    return TileQueue(ring, storage.sNext.get_tensor(cute.make_layout(1)))
