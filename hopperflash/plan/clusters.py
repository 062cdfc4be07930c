"""Pairs of CTAs that load what they stream once for both, into both: K and V, or Q and dO."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from hopperflash.plan.block_range import Tiling, key_block_totals, query_block_totals
from hopperflash.plan.config import BackwardConfig, ForwardConfig, cluster_of
from hopperflash.plan.cost import tile_step
from hopperflash.plan.units import HOPPER
from hopperflash.problem import AttnProblem, MaskKind

PAIR = 2
# Bytes a clock and SM that keep nobody waiting: three quarters of what L2 gives, or of a backward,
# half of whose bytes are added by threads that do not wait for them, all of it.
L2_AT_EASE = {ForwardConfig: 24.0, BackwardConfig: float(HOPPER.l2_bytes)}
_IDLE_LIMIT = 16  # of that many steps of a pair one may be idle


class Sharing(NamedTuple):
    """How many CTAs share what they load, and why."""

    ctas: int
    reason: str


def in_cluster(config: ForwardConfig | BackwardConfig, ctas: int) -> ForwardConfig | BackwardConfig:
    """The configuration with so many CTAs that share."""
    if isinstance(config, ForwardConfig):
        return replace(config, cluster_m=ctas)
    return replace(config, cluster_n=ctas)


def sharing(config: ForwardConfig | BackwardConfig, problem: AttnProblem) -> Sharing:
    """Whether neighbouring tiles of a head should be pairs.

    A pair steps through the blocks that either of its tiles sees, one of them waiting where only
    the other computes: at the edges of a band, and where an odd number of tiles leaves one alone.
    """
    itemsize = problem.dtype.itemsize
    alone, paired = (l2_rate(in_cluster(config, ctas), itemsize) for ctas in (1, PAIR))
    if alone <= L2_AT_EASE[type(config)]:
        return Sharing(1, f"none: {alone:.1f} B a clock of L2 are within reach")
    reason = _obstacle(config, problem)
    if reason is None:
        idle, steps = _idle_steps(config, problem)
        if _IDLE_LIMIT * idle <= steps:
            return Sharing(
                PAIR,
                f"{PAIR} CTAs with neighbouring tiles load each block once, half of it each:"
                f" {paired:.1f} B a clock of L2, not {alone:.1f}; {_percent(idle, steps)} of their"
                " steps are idle",
            )
        reason = f"of the steps of pairs {_percent(idle, steps)} would be idle"
    return Sharing(1, f"none: {reason}")


def cluster_reason(config: ForwardConfig | BackwardConfig, problem: AttnProblem) -> str:
    """Why a planned kernel has clusters, or none."""
    found = sharing(config, problem)
    if found.ctas > cluster_of(config):
        return "none: CTAs that take tiles one by one save more than pairs would"
    return found.reason


def l2_rate(config: ForwardConfig | BackwardConfig, itemsize: int) -> float:
    """Bytes a clock that an SM asks of L2 in the steady state."""
    return tile_step(config, itemsize).units.l2_demand * HOPPER.l2_bytes


def _obstacle(config: ForwardConfig | BackwardConfig, problem: AttnProblem) -> str | None:
    if isinstance(config, BackwardConfig) and problem.deterministic:
        return "tiles take turns with their additions"
    if problem.is_empty:
        return "no query sees a key"
    if problem.is_packed:
        return "sequences are packed, and their tiles come in the order of a table"
    if isinstance(config, ForwardConfig) and problem.mask.kind is MaskKind.WINDOW:
        return "a window moves on from tile to tile"
    if problem.sm_margin:
        return "the CTAs of a bounded grid take tiles one by one"
    return None


def _idle_steps(config: ForwardConfig | BackwardConfig, problem: AttnProblem) -> tuple[int, int]:
    """Steps of a head's pairs in which a CTA computes nothing, and all of them."""
    alone, paired = (_steps(config, problem, tiles) for tiles in (1, PAIR))
    return PAIR * paired - alone, PAIR * paired


def _steps(config: ForwardConfig | BackwardConfig, problem: AttnProblem, tiles: int) -> int:
    """Of a head, if so many tiles were one."""
    p = problem
    if isinstance(config, ForwardConfig):
        tiling = Tiling(p.seqlen_q, p.seqlen_k, tiles * config.queries, config.tile_n)
        return key_block_totals(p.mask, tiling).visited
    tiling = Tiling(p.seqlen_q, p.seqlen_k, config.tile_m, tiles * config.tile_n)
    return query_block_totals(p.mask, tiling).visited


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %"
