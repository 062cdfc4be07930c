"""Which keys a query sees: causal and window options in one canonical form.

Key `j` is visible to query `i` iff `i + (sk - sq) - left <= j <= i + (sk - sq) + right`: inclusive
bounds, aligned so that the last query and the last key meet (bottom-right).
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from hopperflash.errors import InvalidArgument


class MaskKind(Enum):
    """The masks that need different code; bounds themselves are run-time values."""

    FULL = "full"
    CAUSAL = "causal"
    WINDOW = "window"


@dataclass(frozen=True)
class MaskSpec:
    """A band around the bottom-right diagonal; `None` leaves that side unbounded.

    Lengths never enter: a window wider than a sequence stays a window, so that a change of length
    cannot change generated code.
    """

    left: int | None = None
    right: int | None = None

    def __post_init__(self) -> None:
        if (self.left is not None and self.left < 0) or (self.right is not None and self.right < 0):
            raise InvalidArgument(f"mask bounds are lengths, not ({self.left}, {self.right})")

    @classmethod
    def canonical(cls, causal: bool, window_size: Any = (-1, -1)) -> MaskSpec:
        """The mask of the public options; `causal` means `right = min(right, 0)`.

        Raises `InvalidArgument` with one reason per bound that is neither a length nor -1 or None.
        """
        try:
            left, right = window_size
        except (TypeError, ValueError):
            raise InvalidArgument(
                "window_size is not a pair",
                [f"window_size is {window_size!r}: give (left, right), -1 or None for unbounded"],
            ) from None
        reasons: list[str] = []
        bounds = [
            _bound(side, value, reasons) for side, value in (("left", left), ("right", right))
        ]
        if reasons:
            raise InvalidArgument("window_size is out of range", reasons)
        return cls(bounds[0], 0 if causal else bounds[1])

    @property
    def kind(self) -> MaskKind:
        """FULL without bounds, CAUSAL for right 0 alone, WINDOW for every other band."""
        if self.left is None and self.right is None:
            return MaskKind.FULL
        if self.left is None and self.right == 0:
            return MaskKind.CAUSAL
        return MaskKind.WINDOW

    def visible(self, i: int, j: int, seqlen_q: int, seqlen_k: int) -> bool:
        """Whether query `i` sees key `j`."""
        begin, end = self.visible_range(i, seqlen_q, seqlen_k)
        return begin <= j < end

    def visible_range(self, i: int, seqlen_q: int, seqlen_k: int) -> tuple[int, int]:
        """Keys `[begin, end)` that query `i` sees; `begin == end` where it sees none."""
        diagonal = i + seqlen_k - seqlen_q
        begin = 0 if self.left is None else max(0, diagonal - self.left)
        end = seqlen_k if self.right is None else min(seqlen_k, diagonal + self.right + 1)
        return begin, max(begin, end)

    def rows_with_keys(self, seqlen_q: int, seqlen_k: int) -> int:
        """Number of queries that see a key."""
        if seqlen_k == 0:
            return 0
        shift = seqlen_k - seqlen_q
        first = 0 if self.right is None else max(0, -shift - self.right)
        last = seqlen_q if self.left is None else min(seqlen_q, seqlen_k - shift + self.left)
        return max(0, last - first)

    def visible_pairs(self, seqlen_q: int, seqlen_k: int) -> int:
        """Number of (query, key) pairs that are computed, in closed form."""
        offset = seqlen_k - seqlen_q
        up_to_end = seqlen_q * seqlen_k
        if self.right is not None:
            up_to_end = _sum_clipped(offset + self.right + 1, seqlen_q, seqlen_k)
        before_begin = 0
        if self.left is not None:
            before_begin = _sum_clipped(offset - self.left, seqlen_q, seqlen_k)
        return up_to_end - before_begin

    def __str__(self) -> str:
        if self.kind is not MaskKind.WINDOW:
            return str(self.kind.value)
        left = "unbounded" if self.left is None else self.left
        right = "unbounded" if self.right is None else self.right
        return f"window (left {left}, right {right})"


def _bound(side: str, value: Any, reasons: list[str]) -> int | None:
    """One side of `window_size` with -1 as None; what is refused goes into `reasons`."""
    if value is None:
        return None
    try:
        length = operator.index(value)
    except TypeError:
        reasons.append(f"window_size {side} is {value!r}: give an integer, or -1 or None")
        return None
    if length < -1:
        reasons.append(
            f"window_size {side} is {length}: give a length >= 0, or -1 or None for unbounded"
        )
    if length >= 2**63:
        reasons.append(f"window_size {side} is {length}: give a length below 2**63, or -1 or None")
    return None if length == -1 else length


def _sum_clipped(start: int, count: int, upper: int) -> int:
    """Sum of `min(max(start + i, 0), upper)` over `i` in `[0, count)`."""

    def below(stop: int) -> int:
        ramp = max(0, min(stop, upper))
        return ramp * (ramp - 1) // 2 + max(0, stop - upper) * upper

    return below(start + count) - below(start)
