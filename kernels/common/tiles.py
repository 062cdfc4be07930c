"""A tile with the blocks that it visits, as every role of a CTA finds it.

Each role asks anew, so that nothing of a tile is live in all of them.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Constexpr, Int32

from hopperflash.plan.config import (
    BackwardConfig,
    BackwardConfigSm80,
    ForwardConfig,
    ForwardConfigSm80,
)

from .band import Band
from .block_range import BlockRange, key_block_range, query_block_range
from .sequence import Sequence, first_padded_block
from .work import AssignedTile


class QueryTile(NamedTuple):
    """Queries of one head, or of all heads of a group, and the key blocks that they see."""

    m_block: Int32
    head: Int32
    head_k: Int32
    keys: BlockRange
    sequence: Sequence


class KeyTile(NamedTuple):
    """Keys of one head and the query tiles that see them, for all query heads of its group."""

    n_block: Int32
    head_k: Int32
    group: Int32  # query heads a key head
    queries: BlockRange
    sequence: Sequence
    first_padded_block: Int32  # of the sequence, in the row statistics and counters


@cute.jit
def query_tile(
    tile: AssignedTile,
    band: Band,
    heads_per_key: Int32,  # tiles' heads a key head
    config: Constexpr[ForwardConfig | ForwardConfigSm80],
):
    """The query tile of an assignment."""
    return QueryTile(
        m_block=tile.block,
        head=tile.head,
        head_k=tile.head // heads_per_key,
        keys=key_block_range(
            tile.block, tile.sequence.seqlens, band, config.queries, config.tile_n
        ),
        sequence=tile.sequence,
    )


@cute.jit
def key_tile(
    tile: AssignedTile,
    band: Band,
    group: Int32,
    config: Constexpr[BackwardConfig | BackwardConfigSm80],
    packed: Constexpr[bool],
):
    """The key tile of an assignment."""
    return KeyTile(
        n_block=tile.block,
        head_k=tile.head,
        group=group,
        queries=query_block_range(
            tile.block, tile.sequence.seqlens, band, config.tile_m, config.tile_n
        ),
        sequence=tile.sequence,
        first_padded_block=first_padded_block(tile.sequence, packed, config.tile_m),
    )
