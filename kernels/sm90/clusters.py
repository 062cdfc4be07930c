"""Stages of a ring that the CTAs of a cluster fill together, each a share of the rows for all.

A stage is free when it is free in every CTA: consumer warps release it here and there.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, pipeline


class Releases(NamedTuple):
    """How a consumer lane frees a stage in a cluster."""

    active: cutlass.Boolean  # the lane releases, in the CTA whose rank it has
    distance: cutlass.Int32  # to that CTA's shared memory from this one's


def make_releases(barriers: Any, cluster: int, tidx: cutlass.Int32) -> Releases | None:
    """A warp has a lane for each CTA of its cluster; None of a CTA alone."""
    if cluster == 1:
        return None
    lane = tidx % cute.arch.WARP_SIZE
    own = barriers.data_ptr().toint()
    peer = cute.arch.inline_ptx(
        "mapa.shared::cluster.u32 {$w0}, {$r0}, {$r1};",
        write_only_types=[cutlass.Int32],
        read_only_args=[own, lane % cluster],
    )
    return Releases(lane < cluster, peer - own)


@cute.jit
def release(ring: pipeline.PipelineTmaAsync, state: pipeline.PipelineState, releases: Any):
    """Free a stage in this CTA, or in all of its cluster.

    `consumer_release` does the same, but looks for the other CTA's barrier each time.
    """
    if cutlass.const_expr(releases is None):
        ring.consumer_release(state)
    else:
        barrier = ring.sync_object_empty.get_barrier(state.index).toint() + releases.distance
        if releases.active:
            cute.arch.inline_ptx(
                "mbarrier.arrive.shared::cluster.b64 _, [{$r0}];", read_only_args=[barrier]
            )


def rank(cluster: int) -> Any:
    """Which of its cluster's CTAs this one is."""
    if cluster == 1:
        return cutlass.Int32(0)
    return cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())


def everyone(cluster: int) -> cutlass.Int16:
    """The multicast mask of all CTAs of a cluster."""
    return cutlass.Int16((1 << cluster) - 1)


@cute.jit
def leave(cluster: Constexpr[int]):
    """Until all have come here, others of the cluster arrive at this CTA's barriers."""
    if cutlass.const_expr(cluster > 1):
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
