"""Sizes and numbers past which the GPU kernels do not go, whatever the architecture."""

from __future__ import annotations

from collections.abc import Iterator

from hopperflash.problem import AttnProblem, Direction, MaskKind

GRID_YZ_MAX = 65535
GRID_X_MAX = 2**31 - 1
# Device coordinates are 32-bit and run past a sequence by less than two tiles of 128 or one of 192.
SEQLEN_MAX = 2**31 - 256
# Under a window they run past it by a bound as well.
WINDOW_SEQLEN_MAX = 2**29
# Packed rows are counted from the end of a sequence, within 2^30 of it.
PACKED_ROWS_MAX = 2**30 - 256
# Of a persistent kernel, whose CTAs count past the last tile by as many as there are CTAs.
TILES_MAX = 2**31 - 2**16
SMALLEST_TILE, LARGEST_TILE = 32, 128  # of queries or keys, of a backward
# The row maximum is taken before scaling, which asks for a positive factor, and the last factor
# is multiplied by log2(e) in fp32.
SCALE_RANGE = (2.0**-126, 2.0**127)
# The backward has the tanh back from a probability, whose logarithm is exact to 2^-22 or so.
SOFTCAP_MIN = 2.0**-6


def limit_reasons(problem: AttnProblem, direction: Direction) -> list[str]:
    """What exceeds a limit, with the limit."""
    reasons = [
        f"{name} {size} exceeds {limit} ({why})"
        for name, size, limit, why in _sizes(problem, direction)
        if size > limit
    ]
    low, high = SCALE_RANGE
    reasons += [
        f"{name} {factor:g}: its kernels take {low:.3g} to {high:.3g}"
        for name, factor in _factors(problem)
        if not low <= factor <= high
    ]
    if direction == "backward" and 0.0 < problem.softcap < SOFTCAP_MIN:
        reasons.append(
            f"softcap {problem.softcap:g}: its backward takes {SOFTCAP_MIN:g} and more, which it"
            " can tell from rounding"
        )
    return reasons


def _factors(problem: AttnProblem) -> Iterator[tuple[str, float]]:
    """What scores are multiplied by on the way to an exponent."""
    yield "softmax_scale", problem.softmax_scale
    if problem.softcap > 0.0:
        yield "softcap", problem.softcap
        yield "softmax_scale / softcap", problem.softmax_scale / problem.softcap


def _sizes(problem: AttnProblem, direction: Direction) -> Iterator[tuple[str, int, int, str]]:
    p = problem
    rows, why = SEQLEN_MAX, "32-bit coordinates"
    if p.mask.kind is MaskKind.WINDOW:
        rows, why = WINDOW_SEQLEN_MAX, "32-bit coordinates under a window"
    yield "heads", p.heads_q, GRID_YZ_MAX, "grid y"
    if p.sequences is None:
        yield "batch", p.batch, GRID_YZ_MAX, "grid z"
        yield "seqlen_q", p.seqlen_q, rows, why
        yield "seqlen_k", p.seqlen_k, rows, why
        if p.sm_margin:
            most = -(-max(p.seqlen_q, p.seqlen_k) // SMALLEST_TILE) * p.heads_q * p.batch
            yield "tiles", most, TILES_MAX, "32-bit numbers of tiles under sm_margin"
        return
    if rows > PACKED_ROWS_MAX:
        rows, why = PACKED_ROWS_MAX, "30-bit coordinates of packed rows"
    yield "total_q", p.seqlen_q, rows, why
    yield "total_k", p.seqlen_k, rows, why
    most = max(p.seqlen_q, p.seqlen_k) // SMALLEST_TILE + p.sequences + 2
    yield "tiles times heads", most * p.heads_q, GRID_X_MAX, "grid x"
    if direction == "backward":
        padded = p.seqlen_q + LARGEST_TILE * p.sequences
        yield "rows padded to tiles", padded, SEQLEN_MAX, "32-bit coordinates of statistics"
