"""Element arithmetic with PTX semantics, vectorised over lanes (any array shape)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

# An array of any shape, or a numpy scalar.
Array = Any

_F32_TINY = np.float32(2.0**-126)


def flush(x: Array) -> Array:
    """Flush subnormal float32 results to zero of the same sign."""
    return x * (np.abs(x) >= _F32_TINY) if x.size else x


def bf16_to_f32(bits: Array) -> Array:
    """bf16 bit patterns (uint16 or the low half of uint32) to float32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def f32_to_bf16(x: Array) -> Array:
    """float32 to bf16 bits in uint32, round to nearest even; NaN becomes 0x7FFF."""
    return _bf16_in_upper_half(x) >> np.uint32(16)


def _bf16_in_upper_half(x: Array) -> Array:
    """The same in the upper half of uint32, above bits without meaning."""
    x = np.ascontiguousarray(x, np.float32)
    u = x.view(np.uint32)
    r = u >> np.uint32(16)
    r &= np.uint32(1)
    r += np.uint32(0x7FFF)
    r += u
    nan = x != x
    if nan.any():
        r[nan] = 0x7FFF0000
    return r


def f16_to_f32(bits: Array) -> Array:
    return np.ascontiguousarray(bits.astype(np.uint16)).view(np.float16).astype(np.float32)


def f32_to_f16(x: Array) -> Array:
    """float32 to fp16 bits in uint32, round to nearest even; NaN becomes 0x7FFF."""
    r = x.astype(np.float16).view(np.uint16).astype(np.uint32)
    nan = x != x
    if nan.any():
        r[nan] = 0x7FFF
    return r


def pack_bf16x2(hi: Array, lo: Array) -> Array:
    """cvt.rn.bf16x2.f32 d, hi, lo."""
    packed = _bf16_in_upper_half(lo)
    packed >>= np.uint32(16)
    packed |= _bf16_in_upper_half(hi) & np.uint32(0xFFFF0000)
    return packed


def pack_f16x2(hi: Array, lo: Array) -> Array:
    return (f32_to_f16(hi) << np.uint32(16)) | f32_to_f16(lo)


def ex2_ftz(x: Array) -> Array:
    # Subnormal arguments give 1, flushed or not.
    power = np.exp2(x)
    return power * (power >= _F32_TINY)


def saturate(x: Array) -> Array:
    """Clamp to [0, 1]; NaN gives 0."""
    return np.fmin(np.fmax(x, x.dtype.type(0)), x.dtype.type(1))


def mul_wide(a: Array, b: Array) -> Array:
    wide = {"u2": np.uint32, "i2": np.int32, "u4": np.uint64, "i4": np.int64}
    return np.multiply(a, b, dtype=wide[np.asarray(a).dtype.str[1:]])


def mul_hi32(a: Array, b: Array) -> Array:
    a = np.asarray(a)
    wide: Any = np.int64 if a.dtype.kind == "i" else np.uint64
    return (np.multiply(a, b, dtype=wide) >> wide(32)).astype(a.dtype)


def mul_hi16(a: Array, b: Array) -> Array:
    a = np.asarray(a)
    wide: Any = np.int32 if a.dtype.kind == "i" else np.uint32
    return (np.multiply(a, b, dtype=wide) >> wide(16)).astype(a.dtype)


def mul_hi64(a: Array, b: Array) -> Array:
    a, b = np.broadcast_arrays(np.asarray(a), np.asarray(b))
    high = [(int(x) * int(y)) >> 64 for x, y in zip(a.ravel(), b.ravel(), strict=True)]
    return np.array(high, a.dtype).reshape(a.shape)


def truncated_div(a: Array, b: Array) -> Array:
    """Integer division rounding toward zero; division by zero gives all ones."""
    a, b = np.broadcast_arrays(np.asarray(a), np.asarray(b))
    safe = np.where(b == 0, b.dtype.type(1), b)
    q = a // safe
    if a.dtype.kind == "i":
        q = q + ((a % safe != 0) & ((a < 0) != (safe < 0))).astype(a.dtype)
    return np.where(b == 0, np.array(-1).astype(a.dtype), q)


def truncated_rem(a: Array, b: Array) -> Array:
    a, b = np.broadcast_arrays(np.asarray(a), np.asarray(b))
    return np.where(b == 0, a, a - truncated_div(a, b) * b)


def shift_left(a: Array, n: Array) -> Array:
    """Shift amounts are uint32 and clamp at the width of `a`."""
    a = np.asarray(a)
    width = a.dtype.itemsize * 8
    count = np.minimum(n, np.uint32(width - 1)).astype(a.dtype)
    return np.where(n < np.uint32(width), a << count, a.dtype.type(0))


def shift_right(a: Array, n: Array) -> Array:
    a = np.asarray(a)
    width = a.dtype.itemsize * 8
    count = np.minimum(n, np.uint32(width - 1)).astype(a.dtype)
    shifted = a >> count
    if a.dtype.kind == "i":
        return shifted
    return np.where(n < np.uint32(width), shifted, a.dtype.type(0))


def funnel_left(low: Array, high: Array, n: Array) -> Array:
    pair = (np.asarray(high).astype(np.uint64) << np.uint64(32)) | low
    return ((pair << np.asarray(n).astype(np.uint64)) >> np.uint64(32)).astype(np.uint32)


def funnel_right(low: Array, high: Array, n: Array) -> Array:
    pair = (np.asarray(high).astype(np.uint64) << np.uint64(32)) | low
    return (pair >> np.asarray(n).astype(np.uint64)).astype(np.uint32)


def funnel(direction: str, mode: str) -> Callable[[Array, Array, Array], Array]:
    shift = funnel_left if direction == "l" else funnel_right

    def run(low: Array, high: Array, n: Array) -> Array:
        count = n & np.uint32(31) if mode == "wrap" else np.minimum(n, np.uint32(32))
        return shift(low, high, count)

    return run


def bit_extract(a: Array, position: Array, length: Array) -> Array:
    """bfe; signed types extend the sign of the field."""
    a = np.asarray(a)
    width = a.dtype.itemsize * 8
    p = (np.asarray(position).astype(np.int64)) & 255
    n = (np.asarray(length).astype(np.int64)) & 255
    value = a.astype(object) if width == 64 else a.astype(np.int64) & ((1 << width) - 1)
    if width == 64:
        flat = np.broadcast_arrays(value, p, n)
        out = [
            _extract_one(int(v), int(i), int(k), 64, a.dtype.kind == "i")
            for v, i, k in zip(*(f.ravel() for f in flat), strict=True)
        ]
        return (
            np.array([o % (1 << 64) for o in out], np.uint64).reshape(flat[0].shape).view(a.dtype)
        )
    n32 = np.minimum(n, 32)
    field = (value >> np.minimum(p, 63)) & ((np.int64(1) << n32) - 1)
    if a.dtype.kind == "u":
        return field.astype(a.dtype)
    sign_at = np.minimum(p + n - 1, 31)
    sign = np.where(n == 0, 0, (value >> np.maximum(sign_at, 0)) & 1)
    available = np.clip(32 - p, 0, n32)
    field = field | np.where(sign == 1, -(np.int64(1) << available), 0)
    return field.astype(np.uint64).astype(np.uint32).view(np.int32)


def _extract_one(value: int, position: int, length: int, width: int, signed: bool) -> int:
    value %= 1 << width
    field = (value >> position) & ((1 << length) - 1)
    if signed and length:
        sign = (value >> min(position + length - 1, width - 1)) & 1
        if sign:
            field |= -1 << max(0, min(length, width - position))
    return field


def bit_insert(a: Array, b: Array, position: Array, length: Array) -> Array:
    """bfi: the low `length` bits of a go into b at `position`."""
    b = np.asarray(b)
    width = b.dtype.itemsize * 8
    kind = b.dtype.type
    one = kind(1)
    p = (np.asarray(position) & np.uint32(255)).astype(np.uint32)
    n = np.minimum(np.asarray(length) & np.uint32(255), np.uint32(width))
    ones = np.where(n >= width, ~kind(0), (one << np.minimum(n, width - 1).astype(b.dtype)) - one)
    mask = shift_left(ones, p)
    return (b & ~mask) | (shift_left(np.asarray(a), p) & mask)


def permute_bytes(a: Array, b: Array, selector: Array) -> Array:
    """prmt, default mode, with the sign replication bit."""
    pair = (np.asarray(b).astype(np.uint64) << np.uint64(32)) | a
    result = np.zeros(np.broadcast(pair, selector).shape, np.uint32)
    for i in range(4):
        nibble = (np.asarray(selector) >> np.uint32(4 * i)) & np.uint32(15)
        byte = (pair >> ((nibble & np.uint32(7)).astype(np.uint64) * np.uint64(8))) & np.uint64(255)
        sign = np.where(byte & np.uint64(128), np.uint64(255), np.uint64(0))
        byte = np.where(nibble & np.uint32(8), sign, byte)
        result |= byte.astype(np.uint32) << np.uint32(8 * i)
    return result


def lookup3(table: int) -> Callable[[Array, Array, Array], Array]:
    """lop3 with an immediate truth table."""

    def run(a: Array, b: Array, c: Array) -> Array:
        result = np.zeros(np.broadcast(a, b, c).shape, np.uint32)
        for i in range(8):
            if table >> i & 1:
                x = a if i & 4 else ~a
                y = b if i & 2 else ~b
                z = c if i & 1 else ~c
                result |= x & y & z
        return result

    return run


def popcount(a: Array) -> Array:
    a = np.ascontiguousarray(a)
    octets = a.view(np.uint8).reshape((*a.shape, a.dtype.itemsize))
    return np.unpackbits(octets, axis=-1).sum(axis=-1).astype(np.uint32)


def find_leading(a: Array) -> Array:
    """bfind: position of the highest significant bit, 0xFFFFFFFF when there is none."""
    a = np.asarray(a)
    value = np.where(a < 0, ~a, a) if a.dtype.kind == "i" else a
    positions = [int(v).bit_length() - 1 for v in value.ravel()]
    return np.array([p % (1 << 32) for p in positions], np.uint32).reshape(a.shape)


def count_leading_zeros(a: Array) -> Array:
    a = np.asarray(a)
    width = a.dtype.itemsize * 8
    return np.array([width - int(v).bit_length() for v in a.ravel()], np.uint32).reshape(a.shape)


def reverse_bits(a: Array) -> Array:
    a = np.asarray(a)
    width = a.dtype.itemsize * 8
    values = [int(format(int(v), f"0{width}b")[::-1], 2) for v in a.ravel()]
    return np.array(values, a.dtype).reshape(a.shape)


def round_to_integer(mode: str) -> Callable[[Array], Array]:
    return {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}[mode]


def float_to_int(mode: str, target: Any) -> Callable[[Array], Array]:
    """Saturating float to integer conversion; NaN gives 0."""
    info = np.iinfo(target)
    rounding = round_to_integer(mode)

    def run(x: Array) -> Array:
        r = rounding(np.asarray(x, np.float64))
        high = r >= float(info.max)
        low = r <= float(info.min)
        safe = np.where(high | low | (r != r), 0.0, r).astype(target)
        return np.where(high, info.max, np.where(low, info.min, safe)).astype(target)

    return run


def packed(kind: str, fn: Callable[..., Array]) -> Callable[..., Array]:
    """Lift a float32 function to packed pairs of bf16 or fp16 in uint32."""
    load = bf16_to_f32 if kind == "bf16" else f16_to_f32
    store = f32_to_bf16 if kind == "bf16" else f32_to_f16

    def run(*args: Array) -> Array:
        low = [load(np.asarray(a) & np.uint32(0xFFFF)) for a in args]
        high = [load(np.asarray(a) >> np.uint32(16)) for a in args]
        return (store(fn(*high)) << np.uint32(16)) | store(fn(*low))

    return run


def scalar16(kind: str, fn: Callable[..., Array]) -> Callable[..., Array]:
    """Lift a float32 function to bf16 or fp16 values in uint16."""
    load = bf16_to_f32 if kind == "bf16" else f16_to_f32
    store = f32_to_bf16 if kind == "bf16" else f32_to_f16

    def run(*args: Array) -> Array:
        return store(fn(*(load(np.asarray(a)) for a in args))).astype(np.uint16)

    return run
