"""Shared memory of the Hopper backward: operand layouts, storage struct, pipelines, barriers."""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, pipeline
from cutlass.cute.nvgpu import OperandMajorMode

from hopperflash.plan.config import BackwardConfig, POperand

from .. import wgmma

_ALIGNMENT = 1024  # a 128-byte swizzle repeats every 8 rows of 128 bytes
_WARPS_PER_WARPGROUP = 4
_STATISTIC_BYTES = 4


class Barrier(IntEnum):
    """Named barriers; 0 belongs to __syncthreads."""

    CONSUMERS = 1  # all consumer warps: P and dS are in shared memory, or have been read there
    TURN = 2  # of those that compute dQ: this CTA may add to it
    WARPGROUP = 3  # and one more for each other consumer warpgroup: its P is in shared memory


def consumers(config: BackwardConfig) -> pipeline.NamedBarrier:
    """The barrier of all consumer warpgroups."""
    threads = config.consumer_warpgroups * wgmma.THREADS_PER_WARPGROUP
    return pipeline.NamedBarrier(barrier_id=int(Barrier.CONSUMERS), num_threads=threads)


def own_warpgroup(consumer_tidx: Int32) -> pipeline.NamedBarrier:
    """The barrier of a consumer thread's warpgroup alone."""
    number = cute.arch.make_warp_uniform(consumer_tidx // wgmma.THREADS_PER_WARPGROUP)
    return pipeline.NamedBarrier(
        barrier_id=int(Barrier.WARPGROUP) + number, num_threads=wgmma.THREADS_PER_WARPGROUP
    )


@dataclass(frozen=True)
class SmemLayouts:
    """Staged layouts. The transposed view of a K-major tile is the MN-major tile of its transpose,
    so each operand that two GEMMs read from different sides is stored once."""

    K: Any  # (tile_n, head_dim, 1)
    Kt: Any  # (head_dim, tile_n, 1)
    V: Any  # (tile_n, head_dim_v, 1)
    Vt: Any  # (head_dim_v, tile_n, 1): only dV^T leaves through it
    Q: Any  # (tile_m, head_dim, stages)
    Qt: Any  # (head_dim, tile_m, stages)
    dO: Any  # (tile_m, head_dim_v, stages)
    dOt: Any  # (head_dim_v, tile_m, stages)
    St: Any  # (tile_n, tile_m, 1): P^T and dS^T
    S: Any  # (tile_m, tile_n, 1): P and dS


class SmemTensors(NamedTuple):
    """The operands in shared memory."""

    sK: cute.Tensor
    sKt: cute.Tensor
    sV: cute.Tensor
    sVt: cute.Tensor
    sQ: cute.Tensor
    sQt: cute.Tensor
    sdO: cute.Tensor
    sdOt: cute.Tensor
    sPt: Any  # cute.Tensor or None where P stays in registers
    sP: Any  # its transpose, likewise
    sdSt: cute.Tensor
    sdS: cute.Tensor
    sLSE: cute.Tensor  # (tile_m, stages) fp32
    sDelta: cute.Tensor  # (tile_m, stages) fp32


class Pipelines(NamedTuple):
    """Full/empty mbarrier rings from the producer warp to the consumer warpgroups."""

    KV: pipeline.PipelineTmaAsync
    Q: pipeline.PipelineTmaAsync  # with dO and the statistics


def smem_layouts(config: BackwardConfig, dtype: type[cutlass.Numeric]) -> SmemLayouts:
    """Layouts of one CTA's tiles for 16-bit operands."""
    k_major, mn_major = OperandMajorMode.K, OperandMajorMode.MN
    m, n, d, dv = config.tile_m, config.tile_n, config.head_dim, config.head_dim_v
    shares, shares_K = config.key_shares, max(config.key_shares, config.query_shares)
    stages = config.stages
    return SmemLayouts(
        K=wgmma.smem_layout(dtype, (n, d), 1, k_major, shares_K),
        Kt=wgmma.smem_layout(dtype, (d, n), 1, mn_major, shares_K),
        V=wgmma.smem_layout(dtype, (n, dv), 1, k_major, shares),
        Vt=wgmma.smem_layout(dtype, (dv, n), 1, mn_major, shares),
        Q=wgmma.smem_layout(dtype, (m, d), stages, k_major, shares),
        Qt=wgmma.smem_layout(dtype, (d, m), stages, mn_major, shares),
        dO=wgmma.smem_layout(dtype, (m, dv), stages, k_major, shares),
        dOt=wgmma.smem_layout(dtype, (dv, m), stages, mn_major, shares),
        St=wgmma.smem_layout(dtype, (n, m), 1, k_major, shares),
        S=wgmma.smem_layout(dtype, (m, n), 1, mn_major, shares),
    )


def storage_struct(
    config: BackwardConfig, layouts: SmemLayouts, dtype: type[cutlass.Numeric]
) -> type:
    """The CTA's shared memory; `hopperflash.plan.budget` does the same arithmetic on the host."""
    shared_P = config.p_operand is POperand.SHARED
    statistics = config.tile_m * config.stages

    def tile(element: type[cutlass.Numeric], layout: Any, present: bool = True) -> Any:
        size = cute.cosize(layout) if present else 0
        return cute.struct.Align[cute.struct.MemRange[element, size], _ALIGNMENT]

    @cute.struct
    class SharedStorage:
        barriers_KV: cute.struct.MemRange[cutlass.Int64, 2]
        barriers_Q: cute.struct.MemRange[cutlass.Int64, 2 * config.stages]
        sLSE: cute.struct.Align[cute.struct.MemRange[cutlass.Float32, statistics], 128]
        sDelta: cute.struct.Align[cute.struct.MemRange[cutlass.Float32, statistics], 128]
        sK: tile(dtype, layouts.K)
        sV: tile(dtype, layouts.V)
        sQ: tile(dtype, layouts.Q)
        sdO: tile(dtype, layouts.dO)
        sPt: tile(dtype, layouts.St, shared_P)
        sdS: tile(dtype, layouts.St)

    return SharedStorage


def smem_tensors(storage: Any, config: BackwardConfig, layouts: SmemLayouts) -> SmemTensors:
    """Typed views of the storage; the swizzle travels in the pointer, as wgmma and TMA need it."""
    shared_P = config.p_operand is POperand.SHARED

    def view(memory: Any, layout: Any) -> cute.Tensor:
        return memory.get_tensor(layout.outer, swizzle=layout.inner)

    def statistic(memory: Any) -> cute.Tensor:
        return memory.get_tensor(cute.make_layout((config.tile_m, config.stages)))

    return SmemTensors(
        sK=view(storage.sK, layouts.K),
        sKt=view(storage.sK, layouts.Kt),
        sV=view(storage.sV, layouts.V),
        sVt=view(storage.sV, layouts.Vt),
        sQ=view(storage.sQ, layouts.Q),
        sQt=view(storage.sQ, layouts.Qt),
        sdO=view(storage.sdO, layouts.dO),
        sdOt=view(storage.sdO, layouts.dOt),
        sPt=view(storage.sPt, layouts.St) if shared_P else None,
        sP=view(storage.sPt, layouts.S) if shared_P else None,
        sdSt=view(storage.sdS, layouts.St),
        sdS=view(storage.sdS, layouts.S),
        sLSE=statistic(storage.sLSE),
        sDelta=statistic(storage.sDelta),
    )


def make_pipelines(
    storage: Any, config: BackwardConfig, layouts: SmemLayouts, dtype: type[cutlass.Numeric]
) -> Pipelines:
    """One elected producer thread arrives with the bytes, whoever loads them; each consumer warp
    releases once in every CTA that has a share in them."""
    producer = pipeline.CooperativeGroup(pipeline.Agent.Thread)
    statistics = 2 * config.tile_m * _STATISTIC_BYTES

    def tile_bytes(layout: Any) -> int:
        return cute.size_in_bytes(dtype, cute.select(layout, mode=[0, 1]))

    def ring(barriers: Any, tx_count: int, stages: int, ctas: int) -> pipeline.PipelineTmaAsync:
        warps = config.consumer_warpgroups * _WARPS_PER_WARPGROUP
        consumers = pipeline.CooperativeGroup(pipeline.Agent.Thread, ctas * warps)
        return pipeline.PipelineTmaAsync.create(
            barrier_storage=barriers.data_ptr(),
            num_stages=stages,
            producer_group=producer,
            consumer_group=consumers,
            tx_count=tx_count,
            cta_layout_vmnk=cute.make_layout((1, 1, ctas, 1)),
            defer_sync=True,
        )

    return Pipelines(
        KV=ring(storage.barriers_KV, tile_bytes(layouts.K) + tile_bytes(layouts.V), 1, 1),
        Q=ring(
            storage.barriers_Q,
            tile_bytes(layouts.Q) + tile_bytes(layouts.dO) + statistics,
            config.stages,
            config.cluster_n,
        ),
    )
