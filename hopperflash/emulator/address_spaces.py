"""Which memory the addresses of a gang's lanes name: one space and CTA, or several."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .memory import CLUSTER_SHIFT, LOCAL_BASE, SHARED_LIMIT

Addresses = NDArray[np.int64]
_OWN = 1 << CLUSTER_SHIFT
_GLOBAL, _LOCAL = -1, -2
_NAME = {_GLOBAL: "global", _LOCAL: "local"}


def space_of(addresses: Addresses) -> str:
    """The space of generic addresses that all lie in one."""
    first = int(addresses[0])
    if 0 <= first < SHARED_LIMIT:
        return "shared"
    return "local" if first >= LOCAL_BASE else "global"


def parts(space: str, addresses: Addresses) -> list[tuple[str, NDArray[np.int64]]] | None:
    """Lane indices by space and CTA, None where there is one part only.

    `space` is "shared" or, for generic addresses, "".
    """
    if space not in ("", "shared"):
        return None
    lowest, highest = int(addresses.min()), int(addresses.max())
    if (lowest >= 0 and highest < _OWN) or (lowest >= SHARED_LIMIT and highest < LOCAL_BASE):
        return None
    shared = (addresses >= 0) & (addresses < SHARED_LIMIT)
    places = np.where(addresses >= LOCAL_BASE, _LOCAL, _GLOBAL)
    places = np.where(shared, addresses >> CLUSTER_SHIFT, places)
    found = np.unique(places)
    if len(found) == 1:
        return None
    return [(_NAME.get(int(p), "shared"), np.nonzero(places == p)[0]) for p in found]
