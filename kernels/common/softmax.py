"""The streaming softmax: running row maximum and sum, and the rescaling of what was summed before.

Source: FlashAttention-2, arXiv 2307.08691, algorithm 1; here in base 2, with the scale folded into
the exponent.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Float32, Int32

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)
_QUAD = 4  # lanes that hold one row of an accumulator
_OTHER_LANES = (2, 1)  # of a quad, for a butterfly
_LOWEST = -(2.0**126)  # finite, and so are its differences

# 2^f on [-1/2, 1/2] with p(0) = 1, of least relative error: 2^-23.4.
EXP2_COEFFICIENTS = (
    1.0,
    0.6931470036506653,
    0.24022242426872253,
    0.05550733581185341,
    0.009671512991189957,
    0.001326472731307149,
)
_FRACTION_BITS = 23
_ROUND_TO_INTEGER = 1.5 * 2.0**_FRACTION_BITS
_EXP2_UNDERFLOW = -127.0


class Scales(NamedTuple):
    """Factors on the way from Q K^T to exponents.

    With a cap a score s becomes cap * tanh(softmax_scale / cap * s): `inner` is the factor inside
    the tanh, and `log2` multiplies its result. Without one it multiplies s itself.
    """

    softmax: Float32  # the softmax scale, which dQ and dK are multiplied by
    inner: Float32
    log2: Float32


def make_scales(softmax_scale: Float32, softcap: Float32, capped: bool) -> Scales:
    """The factors of a kernel with or without a cap."""
    outer = softcap if capped else softmax_scale
    inner = softmax_scale / softcap if capped else softmax_scale
    return Scales(softmax_scale, inner, outer * LOG2_E)


@cute.jit
def cap_scores(acc_mn: cute.Tensor, scales: Scales):
    """s -> tanh(inner * s), by the MUFU's approximation: relative error 2^-11, as peers have."""
    for r in cutlass.range_constexpr(cute.size(acc_mn, mode=[0])):
        scaled = acc_mn[r, None].load() * cute.full_like(acc_mn[r, None].load(), scales.inner)
        acc_mn[r, None].store(cute.math.tanh(scaled, fastmath=True))


class RowStats(NamedTuple):
    """Running statistics of a thread's rows."""

    row_max: cute.Tensor  # of the exponents: scores times `log2` of the scales
    row_sum: cute.Tensor  # this thread's columns only, until `finish_rows` adds up the quad


class Rescale(NamedTuple):
    """By what a thread's rows of sums under the old maximum are multiplied."""

    exponent: cute.Tensor  # (rows,) at most 0, and 0 under an unchanged maximum
    factor: cute.Tensor  # (rows,) 2^exponent


def make_rescale(rows: int) -> Rescale:
    """For `online_step` to fill; a thread's rows come in pairs."""
    exponent, factor = (cute.make_rmem_tensor(rows, Float32) for _ in range(2))
    return Rescale(exponent, factor)


def make_row_stats(rows: int) -> RowStats:
    """Statistics of `rows` rows before any key was seen."""
    row_max = cute.make_rmem_tensor(rows, Float32)
    row_sum = cute.make_rmem_tensor(rows, Float32)
    row_max.fill(_LOWEST)
    row_sum.fill(0.0)
    return RowStats(row_max, row_sum)


@cute.jit
def online_step(
    acc_S_mn: cute.Tensor,  # scores in, probabilities relative to the running maximum out
    stats: RowStats,
    rescale: Rescale,  # out
    scale_log2: Float32,
    factors_on_fma: Constexpr[bool] = False,
):
    """One key block: update maximum and sum, turn scores into probabilities.

    The MUFU computes the factors too, unless they are to be left to the FMA pipe.
    """
    for r in cutlass.range_constexpr(cute.size(stats.row_max)):
        scores = acc_S_mn[r, None].load()
        score_max = scores.reduce(cute.ReductionOp.MAX, -Float32.inf, 0)
        # Not the reduction of `cute.arch`, which takes four instructions more to pass on NaN.
        for lane in _OTHER_LANES:
            score_max = cute.arch.fmax(score_max, cute.arch.shuffle_sync_bfly(score_max, lane))
        row_max_old = stats.row_max[r]
        row_max = cute.arch.fmax(row_max_old, score_max * scale_log2)
        stats.row_max[r] = row_max
        probabilities = scaled_exp2(scores, scale_log2, -row_max)
        # The difference of what was subtracted, so that its rounding cancels over the blocks too.
        exponent = row_max_old - row_max
        if cutlass.const_expr(factors_on_fma):
            factor = exp2_by_fma(exponent)
        else:
            factor = cute.math.exp2(exponent, fastmath=True)
        rescale.exponent[r], rescale.factor[r] = exponent, factor
        stats.row_sum[r] = probabilities.reduce(cute.ReductionOp.ADD, stats.row_sum[r] * factor, 0)
        acc_S_mn[r, None].store(probabilities)


def scaled_exp2(x: Any, scale: Any, offset: Any) -> Any:
    """2^(x * scale + offset), elementwise, with one rounding before the exponential.

    Written as a fused multiply-add, since the compiler would make one of it anyway. The rounding of
    an offset that all of a row shares cancels in P / row_sum.
    """
    if isinstance(x, cute.TensorSSA):
        scale, offset = cute.full_like(x, scale), cute.full_like(x, offset)
    return cute.math.exp2(cute.math.fma(x, scale, offset), fastmath=True)


@cute.jit
def exp2_by_fma(x: Float32):
    """2^x of x <= 0 without the MUFU: relative error below 2^-22, exactly 1 at 0, and 0 from -127
    on.

    x = n + f with |f| <= 1/2 (Cody and Waite), 2^f by a polynomial, n added to its exponent.
    """
    x = cute.arch.fmax(x, Float32(_EXP2_UNDERFLOW))
    # The sum's last bits are n in two's complement.
    rounded = x + Float32(_ROUND_TO_INTEGER)
    f = x - (rounded - Float32(_ROUND_TO_INTEGER))
    power = Float32(EXP2_COEFFICIENTS[-1])
    for coefficient in EXP2_COEFFICIENTS[-2::-1]:
        power = cute.math.fma(power, f, Float32(coefficient))
    exponent = rounded.bitcast(Int32) << _FRACTION_BITS
    return (exponent + power.bitcast(Int32)).bitcast(Float32)


@cute.jit
def rescale_rows(acc_mn: cute.Tensor, factor: cute.Tensor):
    """Multiply each row of an (M, N) view by its factor."""
    for r in cutlass.range_constexpr(cute.size(factor)):
        acc_mn[r, None].store(acc_mn[r, None].load() * factor[r])


@cute.jit
def rescale_where_needed(acc_mn: cute.Tensor, rescale: Rescale):
    """`rescale_rows`, passed over where no row of the warp has a new maximum.

    The branch also keeps each accumulator in its registers: ptxas then has no need of others.
    """
    changed = Boolean(False)
    for r in cutlass.range_constexpr(0, cute.size(rescale.exponent), 2):
        # Neither is above 0: they are opposite where both are 0, and only there.
        changed = changed or rescale.exponent[r] != -rescale.exponent[r + 1]
    if cute.arch.vote_any_sync(changed):
        rescale_rows(acc_mn, rescale.factor)


@cute.jit
def finish_rows(stats: RowStats, inverse_sum: cute.Tensor, lse: cute.Tensor):
    """Fill 1 / row sum and the natural-log LSE; a row without keys gets 0 and -inf."""
    for r in cutlass.range_constexpr(cute.size(stats.row_max)):
        row_sum = cute.arch.warp_reduction_sum(stats.row_sum[r], threads_in_group=_QUAD)
        empty = row_sum == 0.0
        inverse_sum[r] = Float32(0.0) if empty else cute.arch.rcp_approx(row_sum)
        log2_sum = cute.math.log2(row_sum, fastmath=True)
        lse[r] = -Float32.inf if empty else (stats.row_max[r] + log2_sum) * LN_2
