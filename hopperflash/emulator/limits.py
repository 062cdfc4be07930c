"""Limits of a launch that the driver or the hardware would refuse."""

from __future__ import annotations

import math
from typing import Any

from .errors import EmulationError

MAX_THREADS = 1024
MAX_BLOCK_Z = 64
MAX_GRID = (2**31 - 1, 65535, 65535)
MAX_CLUSTER = 16
"""With the non-portable size allowed, as CuTe DSL's host code asks for; 8 without."""
MAX_PARAMETER_BYTES = 32764
MAX_SHARED_BYTES = 232448
REGISTERS_PER_CTA = 65536


def check_launch(launch: Any, static_shared: int) -> None:
    """Refuses a `Launch` that cannot start."""
    kernel, block, grid, cluster = launch.kernel, launch.block, launch.grid, launch.cluster
    threads = math.prod(block)
    broken = []
    if kernel.reqntid is not None and kernel.reqntid != tuple(block):
        broken.append(f"block {block}, .reqntid {kernel.reqntid}")
    if kernel.cluster is not None and kernel.cluster != tuple(cluster):
        broken.append(f"cluster {cluster}, .reqnctapercluster {kernel.cluster}")
    if threads > MAX_THREADS or block[2] > MAX_BLOCK_Z:
        broken.append(f"block {block}: more than {MAX_THREADS} threads or {MAX_BLOCK_Z} along z")
    if any(extent > most for extent, most in zip(grid, MAX_GRID, strict=True)):
        broken.append(f"grid {grid}: more than {MAX_GRID}")
    if any(g % c for g, c in zip(grid, cluster, strict=True)):
        broken.append(f"grid {grid} is no multiple of {cluster}")
    if math.prod(cluster) > MAX_CLUSTER:
        broken.append(f"cluster {cluster}: more than {MAX_CLUSTER} CTAs")
    if kernel.param_bytes > MAX_PARAMETER_BYTES:
        broken.append(f"{kernel.param_bytes} bytes of parameters: more than {MAX_PARAMETER_BYTES}")
    if static_shared + launch.shared_bytes > MAX_SHARED_BYTES:
        broken.append(
            f"{static_shared + launch.shared_bytes} bytes of shared memory: "
            f"more than {MAX_SHARED_BYTES}"
        )
    if kernel.maxnreg * threads > REGISTERS_PER_CTA:
        broken.append(
            f"{kernel.maxnreg} registers x {threads} threads: more than {REGISTERS_PER_CTA}"
        )
    if broken:
        raise EmulationError(f"{kernel.name} cannot be launched: " + "; ".join(broken))
