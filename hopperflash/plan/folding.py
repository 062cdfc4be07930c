"""Query heads that share a key head, folded into the rows of a forward tile."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from hopperflash.plan.config import ForwardConfig, ForwardConfigSm80

ForwardT = TypeVar("ForwardT", ForwardConfig, ForwardConfigSm80)

_IDLE_LIMIT = 16  # of that many rows of a tile one may be idle


def fold_heads(config: ForwardT, source: str, group: int) -> tuple[ForwardT, str]:
    """The configuration with all heads of a group in a tile where that pays, and why it is so."""
    if not folding_pays(group, config.tile_m):
        return config, source
    reason = f"{source}; {group} heads that share keys in the rows of a tile"
    return replace(config, group=group), reason


def folding_pays(group: int, tile_m: int) -> bool:
    """Whether the rows of a tile should be all query heads of a group.

    A tile then holds fewer queries, so fewer rows are idle behind the last query and fewer blocks
    are cut by the diagonal; idle are the rows that the group does not divide. It is the group that
    decides and not the length, which must not ask for another kernel.
    """
    return 1 < group <= tile_m and _IDLE_LIMIT * (tile_m % group) <= tile_m
