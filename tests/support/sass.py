"""Which machine instructions belong to Hopper."""

from __future__ import annotations

from hopperflash.analysis import SassListing

# How opcodes begin that no older part has: warpgroup MMA and its fences, TMA and bulk copies,
# mbarriers, register hand-over, stmatrix, elect.sync and cluster barriers.
HOPPER_ONLY = (
    "HGMMA",
    "WARPGROUP",
    "UTMA",
    "UBLK",
    "SYNCS",
    "USETMAXREG",
    "STSM",
    "ELECT",
    "UCGABAR",
)


def hopper_only(sass: SassListing) -> set[str]:
    """The members of `HOPPER_ONLY` that a kernel uses."""
    return {start for start in HOPPER_ONLY if any(op.startswith(start) for op in sass.opcodes)}
