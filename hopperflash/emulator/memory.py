"""Global memory (real process memory behind registered regions) and shared memory of a CTA."""

from __future__ import annotations

import bisect
import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .errors import AddressError
from .global_order import NoGlobalOrder
from .swizzle import GRANULE, as_granules
from .traffic import TouchedBytes

SHARED_BASE = 1024
# mapa puts (rank + 1) above the 24 address bits of a CTA's own shared window.
CLUSTER_SHIFT = 24
SHARED_LIMIT = 32 << CLUSTER_SHIFT
LOCAL_BASE = 1 << 60

_UNSIGNED: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
Addresses = NDArray[np.int64]


def unsigned(itemsize: int) -> Any:
    return _UNSIGNED[itemsize]


class Region(NamedTuple):
    """Registered bytes [start, end)."""

    start: int
    end: int
    name: str
    writable: bool


class GlobalMemory:
    """Process memory that kernels may touch; everything else is an AddressError."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._regions: list[Region] = []
        self._views: dict[tuple[int, int, int], NDArray[Any]] = {}
        self.order = NoGlobalOrder()
        """Who looks for races; told about every access."""
        self.forget_touched()

    def forget_touched(self) -> None:
        """Starts a new record of the bytes that are loaded and stored."""
        self.loaded, self.stored = TouchedBytes(), TouchedBytes()

    def add(self, start: int, nbytes: int, name: str, writable: bool = True) -> None:
        """Register a region; a region that repeats or lies inside another one is merged into it."""
        if nbytes <= 0:
            return
        lo, hi = start, start + nbytes
        keep = []
        for region in self._regions:
            if region.start <= lo and hi <= region.end and region.writable >= writable:
                return
            if lo <= region.start and region.end <= hi and writable >= region.writable:
                continue
            keep.append(region)
        keep.append(Region(lo, hi, name, writable))
        keep.sort()
        self._regions = keep
        self._starts = [r.start for r in keep]

    def _nearest(self, address: int) -> str:
        if not self._regions:
            return "no region is registered"

        def distance(r: Region) -> int:
            return max(r.start - address, address - r.end + 1, 0)

        near = min(self._regions, key=distance)
        side = "before" if address < near.start else "past the end of"
        if near.start <= address < near.end:
            return f"inside {near.name} [{near.start:#x}, {near.end:#x})"
        by = near.start - address if address < near.start else address - near.end
        return f"{by} bytes {side} {near.name} [{near.start:#x}, {near.end:#x})"

    def check(self, lo: int, hi: int, write: bool) -> Region:
        """The region that holds [lo, hi)."""
        i = bisect.bisect_right(self._starts, lo) - 1
        while i >= 0:
            region = self._regions[i]
            if region.start <= lo and hi <= region.end:
                if write and not region.writable:
                    raise AddressError(f"write to read-only {region.name} at {lo:#x}")
                return region
            i -= 1
        action = "write" if write else "read"
        raise AddressError(
            f"global {action} of [{lo:#x}, {hi:#x}) is outside the registered memory: "
            f"{self._nearest(lo if lo < self._starts[0] else hi - 1) if self._starts else ''}"
        )

    def view(self, addr: int, nbytes: int, write: bool = False) -> NDArray[np.uint8]:
        """Zero-copy bytes of a checked range."""
        start, data = self._typed(self.check(addr, addr + nbytes, write), 1)
        return data[addr - start : addr - start + nbytes]

    def touch_box(
        self, addr: int, shape: Sequence[int], strides: Sequence[int], itemsize: int, write: bool
    ) -> None:
        """Notes a box of items, inside one region, as loaded or stored."""
        region = self.check(addr, addr + itemsize, write)
        start = region.start & ~15
        touched = self.stored if write else self.loaded
        touched.box(start, region.end, addr - start, shape, strides, itemsize)
        self.order.box(start, region.end, addr - start, shape, strides, itemsize, write)

    def _typed(self, region: Region, itemsize: int) -> tuple[int, NDArray[Any]]:
        start = region.start & ~15
        key = (start, region.end, itemsize)
        view = self._views.get(key)
        if view is None:
            nbytes = (region.end + 15 & ~15) - start
            raw = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(start))
            view = self._views[key] = raw.view(_UNSIGNED[itemsize])
        return start, view

    def _parts(
        self, addrs: Addresses, nbytes: int, write: bool
    ) -> list[tuple[Region, NDArray[np.int64] | None]]:
        lo, hi = int(addrs.min()), int(addrs.max()) + nbytes
        try:
            return [(self.check(lo, hi, write), None)]
        except AddressError:
            pass
        parts: dict[Region, list[int]] = {}
        for i, a in enumerate(addrs):
            parts.setdefault(self.check(int(a), int(a) + nbytes, write), []).append(i)
        return [(region, np.array(index)) for region, index in parts.items()]

    def load(self, addrs: Addresses, itemsize: int, count: int) -> NDArray[Any]:
        """Gather `count` consecutive items per lane: [count, lanes]."""
        check_alignment(addrs, itemsize * count, "global")
        out = np.empty((count, len(addrs)), _UNSIGNED[itemsize])
        for region, lanes in self._parts(addrs, itemsize * count, False):
            start, view = self._typed(region, itemsize)
            index = ((addrs if lanes is None else addrs[lanes]) - start) // itemsize
            items = index + np.arange(count)[:, None]
            self.loaded.items(start, region.end, items, itemsize)
            self.order.items(start, region.end, items, itemsize, False)
            for c in range(count):
                out[c, slice(None) if lanes is None else lanes] = view[index + c]
        return out

    def store(self, addrs: Addresses, values: NDArray[Any]) -> None:
        """Scatter [count, lanes]; the highest lane wins where addresses coincide."""
        count, itemsize = len(values), values.dtype.itemsize
        check_alignment(addrs, itemsize * count, "global")
        for region, lanes in self._parts(addrs, itemsize * count, True):
            start, view = self._typed(region, itemsize)
            index = ((addrs if lanes is None else addrs[lanes]) - start) // itemsize
            items = index + np.arange(count)[:, None]
            self.stored.items(start, region.end, items, itemsize)
            new = values if lanes is None else values[:, lanes]
            if self.order.watches:
                changed = view[items] != new
                self.order.items(start, region.end, items, itemsize, True, changed)
            for c in range(count):
                view[index + c] = new[c]


def check_alignment(addrs: Addresses, nbytes: int, space: str) -> None:
    if int(np.bitwise_or.reduce(addrs, axis=None)) & (nbytes - 1):
        bad = int(addrs[addrs & (nbytes - 1) != 0][0])
        raise AddressError(f"misaligned {nbytes}-byte {space} access at {bad:#x}")


class SharedMemory:
    """Shared memory of one CTA; fresh bytes are 0xFF (NaN)."""

    def __init__(self, nbytes: int, base: int = SHARED_BASE) -> None:
        self.base = base
        self.size = nbytes
        self.data: NDArray[np.uint8] = np.full((nbytes + 15) // 16 * 16, 0xFF, np.uint8)
        self._views = {size: self.data.view(kind) for size, kind in _UNSIGNED.items()}

    def check(self, lo: int, hi: int) -> None:
        if lo < self.base or hi > self.base + self.size:
            raise AddressError(
                f"shared access of [{lo:#x}, {hi:#x}) is outside the CTA's "
                f"[{self.base:#x}, {self.base + self.size:#x})"
            )

    def load(self, addrs: Addresses, itemsize: int, count: int) -> NDArray[Any]:
        """Gather `count` consecutive items per lane: [count, lanes]."""
        nbytes = itemsize * count
        self.check(int(addrs.min()), int(addrs.max()) + nbytes)
        check_alignment(addrs, nbytes, "shared")
        if nbytes == GRANULE:
            pieces = as_granules(self.data)[(addrs - self.base) >> 4]
            wide: NDArray[Any] = pieces.view(_UNSIGNED[itemsize]).reshape(-1, count).T
            return wide
        index = (addrs - self.base) // itemsize
        view = self._views[itemsize]
        if count > 1:
            index = index[None, :] + np.arange(count)[:, None]
        values: NDArray[Any] = view[index].reshape(count, -1)
        return values

    def store(self, addrs: Addresses, values: NDArray[Any]) -> None:
        """Scatter [count, lanes]; the highest lane wins where addresses coincide."""
        count, itemsize = len(values), values.dtype.itemsize
        nbytes = itemsize * count
        self.check(int(addrs.min()), int(addrs.max()) + nbytes)
        check_alignment(addrs, nbytes, "shared")
        if nbytes == GRANULE:
            pieces = as_granules(np.ascontiguousarray(values.T).view(np.uint8))
            as_granules(self.data)[(addrs - self.base) >> 4] = pieces[:, 0]
            return
        index = (addrs - self.base) // itemsize
        view = self._views[itemsize]
        for c in range(count):
            view[index + c] = values[c]

    def bytes_at(self, addr: int, nbytes: int) -> NDArray[np.uint8]:
        """Zero-copy bytes of a checked range."""
        self.check(addr, addr + nbytes)
        return self.data[addr - self.base : addr - self.base + nbytes]
