"""How far a result may lie from the reference: as far as the plain formula in low precision does.

With `ref` the attention in fp64 or fp32 and `low` the materialised formula in the input dtype,

    max|out - ref| <= factor * max|low - ref| + 2 * max|(ref + 0.3 - 0.3) - ref|

and likewise for the root mean square (FlashAttention's rule). So the bound scales with problem and
dtype, and no test carries numbers of its own.

A gradient may be 0 because large terms cancel: with a single key dS = P (dP - delta) = 0, while dP
and delta are sums of |dO| |V|. No fp32 algorithm gets closer than the rounding of such sums, and
`low` may cancel exactly, so `terms`, what the absolute values of the terms add up to, widens the
bound by 2^-23 max|terms|. Where nothing cancels that is far below the other parts. An LSE is its
own term: fp32 cannot hold it better than to its last bits, also where `low` is exact by luck.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

FP32_EPSILON = 2.0**-23


@dataclass(frozen=True)
class Deviation:
    """A result's error over the finite elements of the reference, beside what is allowed.

    `worst` is the index of the largest error, None where no element is finite. A mismatch is an
    element that is NaN, +Inf or -Inf in one of result and reference and not the same in the other.
    """

    max_error: float
    max_bound: float
    rms_error: float
    rms_bound: float
    worst: tuple[int, ...] | None
    nonfinite_mismatches: int
    first_mismatch: tuple[int, ...] | None

    @property
    def ok(self) -> bool:
        return (
            self.nonfinite_mismatches == 0
            and self.max_error <= self.max_bound
            and self.rms_error <= self.rms_bound
        )


def tolerance(
    out: Tensor,
    ref: Tensor,
    low: Tensor,
    *,
    factor: float = 2.0,
    terms: Tensor | None = None,
) -> Deviation:
    """Measures `out` against `ref`, with the error of `low` as the yardstick.

    `terms`, of a result that is a sum with cancellation, holds the sum of its terms' magnitudes.

    Raises `ValueError` where the comparison would mean nothing: shapes differ, `ref` is itself in
    low precision, or `low` is not finite where `ref` is.
    """
    if not out.shape == ref.shape == low.shape:
        raise ValueError(
            f"shapes differ: {tuple(out.shape)}, {tuple(ref.shape)}, {tuple(low.shape)}"
        )
    if ref.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"the reference is {ref.dtype}: compute it in float32 or float64")
    out, ref, low = (x.detach().cpu() for x in (out, ref, low))
    finite = ref.isfinite()
    mismatches = ~_same_nonfinite(out, ref)
    if not low[finite].isfinite().all():
        raise ValueError("the low-precision formula overflows where the reference is finite")

    comparable = finite & ~mismatches
    error = torch.where(comparable, out.double() - ref.double(), 0.0).abs()
    allowed = torch.where(comparable, low.double() - ref.double(), 0.0).abs()
    ref32 = torch.where(comparable, ref, 0.0).float()  # results are accumulated in fp32
    round_off = ((ref32 + 0.3 - 0.3) - ref32).double().abs()
    floor = torch.zeros_like(error) if terms is None else FP32_EPSILON * terms.double().abs()
    floor = torch.where(comparable, floor, 0.0)
    return Deviation(
        max_error=_max(error),
        max_bound=factor * _max(allowed) + 2 * _max(round_off) + _max(floor),
        rms_error=_rms(error, comparable),
        rms_bound=factor * _rms(allowed, comparable)
        + 2 * _rms(round_off, comparable)
        + _rms(floor, comparable),
        worst=_argmax(error) if comparable.any() else None,
        nonfinite_mismatches=int(mismatches.sum()),
        first_mismatch=_argmax(mismatches.int()) if mismatches.any() else None,
    )


def _same_nonfinite(out: Tensor, ref: Tensor) -> Tensor:
    return (
        (out.isnan() == ref.isnan())
        & (out.isposinf() == ref.isposinf())
        & (out.isneginf() == ref.isneginf())
    )


def _max(error: Tensor) -> float:
    return float(error.max()) if error.numel() else 0.0


def _rms(error: Tensor, comparable: Tensor) -> float:
    return math.sqrt(float(error.square().sum()) / max(1, int(comparable.sum())))


def _argmax(values: Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in torch.unravel_index(values.argmax(), values.shape))
