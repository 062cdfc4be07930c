"""Special registers: %tid, %ctaid, %laneid and the rest."""

from __future__ import annotations

from typing import Any

import numpy as np

from .errors import UnknownInstruction

_DTYPE: dict[str, Any] = {
    "h": np.uint16, "u": np.uint32, "i": np.int32, "q": np.uint64, "l": np.int64,
}  # fmt: skip
# Change between reads, with the lowest bit that they show; the rest is fixed while a CTA runs.
_CLOCKS = {
    "%clock": 0, "%clock64": 0, "%clock_hi": 32,
    "%globaltimer": 0, "%globaltimer_lo": 0, "%globaltimer_hi": 32,
}  # fmt: skip


def read_special(gang: Any, name: str, view: str) -> Any:
    """The value of a special register for the lanes of a gang, as the type of a view."""
    if name in _CLOCKS:
        return _DTYPE[view](gang.cta.machine.tick() >> _CLOCKS[name])
    key = f"{name}:{view}:{gang.cta.serial}"
    value = gang.special.get(key)
    if value is None:
        if len(gang.special) > 256:
            gang.special.clear()
        value = gang.special[key] = np.asarray(_compute(gang, name)).astype(_DTYPE[view])
    return value


def _compute(gang: Any, name: str) -> Any:
    base, _, axis = name.partition(".")
    i = "xyz".find(axis) if axis else 0
    cta = gang.cta
    threads = gang.threads
    bx, by, _ = cta.block
    if base == "%tid":
        return (threads % bx, threads // bx % by, threads // (bx * by))[i]
    if base == "%laneid":
        return threads & 31
    if base == "%warpid":
        return threads >> 5
    if base.startswith("%lanemask_"):
        return _lane_mask(threads & 31, base[len("%lanemask_") :])
    values = {
        "%ntid": cta.block,
        "%ctaid": cta.index,
        "%nctaid": cta.grid,
        "%cluster_ctaid": cta.cluster_index,
        "%cluster_nctaid": cta.cluster_dims,
        "%clusterid": tuple(c // d for c, d in zip(cta.index, cta.cluster_dims, strict=True)),
        "%nclusterid": tuple(g // d for g, d in zip(cta.grid, cta.cluster_dims, strict=True)),
    }
    if base in values:
        return values[base][i]
    scalars = {
        "%cluster_ctarank": cta.rank,
        "%cluster_nctarank": int(np.prod(cta.cluster_dims)),
        "%nwarpid": (cta.threads + 31) // 32,
        "%smid": 0,
        "%nsmid": 132,
        "%gridid": 0,
        "%is_explicit_cluster": 1,
        "%dynamic_smem_size": cta.dynamic_shared,
        "%total_smem_size": cta.shared.size,
    }
    if base not in scalars:
        raise UnknownInstruction(f"special register {name} is not implemented")
    return scalars[base]


def _lane_mask(lane: Any, kind: str) -> Any:
    bit = np.uint64(1) << lane.astype(np.uint64)
    below = bit - np.uint64(1)
    full = np.uint64(0xFFFFFFFF)
    masks = {
        "eq": bit, "lt": below, "le": below | bit, "gt": full & ~(below | bit), "ge": full & ~below,
    }  # fmt: skip
    return masks[kind]
