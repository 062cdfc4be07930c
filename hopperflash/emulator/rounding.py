"""Correct rounding: exact results in float64, rounded to odd, then narrowed once.

Rounding to odd keeps what a later rounding to fewer bits has to know: a value that is not exact
ends in a one bit, so that it never looks like a tie or like a value of the narrower format.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = Any
_DROPPED = np.int64((1 << 29) - 1)
"""The mantissa bits that float64 has and float32 has not."""
_TIE = np.int64(1 << 28)
_SMALLEST_NORMAL = np.float32(2.0**-126)


def two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """The rounded float64 sum and what rounding took away."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def to_odd(rounded: Array, error: Array) -> NDArray[np.float64]:
    """`rounded + error` rounded to odd, from its nearest float64 and the rest."""
    bits = np.array(rounded, np.float64).view(np.int64)
    inexact = np.isfinite(rounded) & np.isfinite(error) & (error != 0) & (bits & 1 == 0)
    outward = np.signbit(error) == np.signbit(rounded)
    return np.where(inexact, bits + np.where(outward, 1, -1), bits).view(np.float64)


def narrow(values: NDArray[np.float64], mode: str, kind: Any = np.float32) -> Array:
    """float64 values in a narrower format, rounded as rn, rz, rm or rp."""
    nearest = values.astype(kind)
    if mode == "rn":
        return nearest
    back = nearest.astype(np.float64)
    above, below = back > values, back < values
    if mode == "rz":
        above, below = above & (values > 0), below & (values < 0)
    elif mode == "rm":
        below = np.zeros_like(below)
    else:
        above = np.zeros_like(above)
    down = np.nextafter(nearest, kind(-np.inf))
    up = np.nextafter(nearest, kind(np.inf))
    return np.where(above, down, np.where(below, up, nearest))


def narrow_to_odd(values: NDArray[np.float64]) -> NDArray[np.float32]:
    """float64 values (exact, or odd) rounded to odd in float32."""
    bits = narrow(values, "rz").view(np.uint32)
    inexact = np.isfinite(values) & (bits.view(np.float32).astype(np.float64) != values)
    odd: NDArray[np.float32] = (bits | inexact.astype(np.uint32)).view(np.float32)
    return odd


def _exact_fma(a: Array, b: Array, c: Array) -> NDArray[np.float64]:
    """a * b + c of float32 values, rounded to odd in float64."""
    product = np.multiply(a, b, dtype=np.float64)
    return to_odd(*two_sum(product, np.asarray(c, np.float64)))


def fma(a: Array, b: Array, c: Array) -> Array:
    """float32 fma: the float64 sum decides, but where it could round twice."""
    total = np.multiply(a, b, dtype=np.float64)
    if total.shape == np.shape(c) and total.shape:
        total += c
    else:
        total = np.atleast_1d(total + c)
    result = total.astype(np.float32)
    doubtful = (total.view(np.int64) & _DROPPED) == _TIE
    doubtful |= np.abs(result) < _SMALLEST_NORMAL
    if doubtful.any():
        doubtful &= total != 0
        a, b, c = (np.broadcast_to(x, total.shape)[doubtful] for x in (a, b, c))
        result[doubtful] = _exact_fma(a, b, c).astype(np.float32)
    return result


def fma_to_odd(a: Array, b: Array, c: Array) -> NDArray[np.float32]:
    """float32 fma rounded to odd: what a 16-bit fma rounds once more."""
    return narrow_to_odd(_exact_fma(a, b, c))


def fma64(a: Array, b: Array, c: Array) -> Array:
    """float64 fma, exact in fractions."""
    a, b, c = np.broadcast_arrays(*(np.asarray(x, np.float64) for x in (a, b, c)))
    result = a * b + c
    finite = np.isfinite(a) & np.isfinite(b) & np.isfinite(c)
    for at in np.ndindex(result.shape):
        if finite[at]:
            exact = Fraction(float(a[at])) * Fraction(float(b[at])) + Fraction(float(c[at]))
            if exact:
                result[at] = _nearest(exact)
    return result


def _nearest(exact: Fraction) -> float:
    try:
        return exact.numerator / exact.denominator
    except OverflowError:
        return np.inf if exact > 0 else -np.inf


def arithmetic(name: str, mode: str) -> Callable[..., Array]:
    """float32 add, sub, mul, fma, div, rcp or sqrt with a directed rounding."""

    def run(*args: Array) -> Array:
        wide = [np.asarray(x, np.float64) for x in args]
        return narrow(_EXACT[name](*wide), mode)

    return run


def _exact_sum(a: Array, b: Array) -> NDArray[np.float64]:
    return to_odd(*two_sum(a, b))


# Quotients and roots of 24-bit numbers are never so close to one that float64 could not tell.
_EXACT: dict[str, Callable[..., Any]] = {
    "add": _exact_sum,
    "sub": lambda a, b: _exact_sum(a, -b),
    "mul": np.multiply,
    "fma": _exact_fma,
    "div": np.divide,
    "rcp": lambda a: np.divide(1.0, a),
    "sqrt": np.sqrt,
}


def integer_to_float(mode: str, kind: Any) -> Callable[[Array], Array]:
    """64-bit or narrower integers in float32 or float16, rounded once."""

    def run(values: Array) -> Array:
        values = np.asarray(values)
        nearest = values.astype(np.float64)
        rest = [int(v) - int(n) for v, n in zip(values.ravel(), nearest.ravel(), strict=True)]
        error = np.array(rest, np.float64).reshape(values.shape)
        return narrow(to_odd(nearest, error), mode, kind)

    return run
