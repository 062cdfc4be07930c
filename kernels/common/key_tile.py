"""The order in which every role of a CTA walks its query tiles."""

from __future__ import annotations

from typing import NamedTuple

from cutlass import Int32

from .block_range import BlockRange
from .sequence import Sequence


class KeyTile(NamedTuple):
    """The key tile of a CTA and the query tiles that see it, for all query heads of its group."""

    n_block: Int32
    head_k: Int32
    group: Int32  # query heads a key head
    queries: BlockRange
    sequence: Sequence
    first_padded_block: Int32  # of the sequence, in the row statistics and counters


def query_tiles(tile: KeyTile) -> Int32:
    """Query tiles that a CTA streams: group times those of one head."""
    return tile.group * (tile.queries.end - tile.queries.begin)
