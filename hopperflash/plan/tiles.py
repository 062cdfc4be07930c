"""What tile tables share: the head dims tiles come in, and how a row is found."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar

from hopperflash.problem import MaskKind

FULL = (MaskKind.FULL,)
CAUSAL = (MaskKind.CAUSAL,)
WINDOW = (MaskKind.WINDOW,)
BANDED = CAUSAL + WINDOW
OPEN = FULL + CAUSAL  # without a far edge
ANY = FULL + BANDED

# What a head dim is padded to: Q and K to one of these, V and O to another.
HEAD_DIMS = (64, 96, 128, 192, 256)


class Tile(Protocol):
    """A row of a table, for head dims up to those given."""

    @property
    def head_dim(self) -> int: ...
    @property
    def head_dim_v(self) -> int: ...
    @property
    def masks(self) -> tuple[MaskKind, ...]: ...


TileT = TypeVar("TileT", bound=Tile)


def padded_head_dim(head_dim: int) -> int:
    """The smallest size of `HEAD_DIMS` that holds `head_dim`; ValueError above the largest."""
    for size in HEAD_DIMS:
        if size >= head_dim:
            return size
    raise ValueError(f"head_dim {head_dim} exceeds the largest tile's {HEAD_DIMS[-1]}")


def first_that_holds(
    rows: Iterable[TileT], head_dim: int, head_dim_v: int, mask_kind: MaskKind
) -> TileT:
    """The first row for two head dims and a mask; LookupError where there is none."""
    for row in rows:
        if row.head_dim >= head_dim and row.head_dim_v >= head_dim_v and mask_kind in row.masks:
            return row
    raise LookupError(
        f"no tile for head_dim {head_dim}, head_dim_v {head_dim_v}, mask {mask_kind.value}"
    )
