"""Per-lane opcodes against numpy and Python integers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.ptx import apply, execute

Array = NDArray[Any]
RNG = np.random.default_rng(7)
SPECIAL = [0.0, -0.0, 1.0, -1.5, np.inf, -np.inf, np.nan, 1e-40, 65504.0, 1e38]


def integers(dtype: Any, n: int = 32) -> Array:
    info = np.iinfo(dtype)
    values = RNG.integers(info.min, info.max, n, dtype=dtype, endpoint=True)
    values[:3] = info.min, info.max, 1
    return values


def floats(n: int = 32) -> Array:
    values = (RNG.standard_normal(n) * 10).astype(np.float32)
    values[: len(SPECIAL)] = SPECIAL
    return values


def shuffled_floats() -> Array:
    return RNG.permutation(floats())


def wrapped(values: list[int], dtype: Any) -> Array:
    bits = 8 * np.dtype(dtype).itemsize
    unsigned = np.array([v % (1 << bits) for v in values], f"u{bits // 8}")
    return unsigned.view(dtype)


PAIRWISE: dict[str, Callable[[int, int], int]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul.lo": lambda a, b: a * b,
    "min": min,
    "max": max,
}


@pytest.mark.parametrize("kind", ["u16", "s16", "u32", "s32", "u64", "s64"])
@pytest.mark.parametrize("name", PAIRWISE)
def test_integer_pairs_wrap(name: str, kind: str) -> None:
    dtype = np.dtype(kind.replace("s", "i")[0] + str(int(kind[1:]) // 8))
    a, b = integers(dtype), integers(dtype)[::-1].copy()
    expected = [PAIRWISE[name](int(x), int(y)) for x, y in zip(a, b, strict=True)]
    assert np.array_equal(apply(f"{name}.{kind}", a, b, dtype=dtype), wrapped(expected, dtype))


@pytest.mark.parametrize(("kind", "dtype"), [("u32", np.uint32), ("s32", np.int32)])
def test_products_and_division(kind: str, dtype: Any) -> None:
    a, b, c = integers(dtype), integers(dtype)[::-1].copy(), integers(dtype)
    wide = np.uint64 if kind[0] == "u" else np.int64
    products = [int(x) * int(y) for x, y in zip(a, b, strict=True)]
    assert np.array_equal(apply(f"mul.wide.{kind}", a, b, dtype=wide), wrapped(products, wide))
    high = [p >> 32 for p in products]
    assert np.array_equal(apply(f"mul.hi.{kind}", a, b, dtype=dtype), wrapped(high, dtype))
    mad = [p + int(z) for p, z in zip(products, c, strict=True)]
    assert np.array_equal(apply(f"mad.lo.{kind}", a, b, c, dtype=dtype), wrapped(mad, dtype))
    divisor = np.where(b == 0, dtype(3), b >> 20) | dtype(1)
    pairs = [(int(x), int(y)) for x, y in zip(a, divisor, strict=True)]
    quotients = [abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1) for x, y in pairs]
    assert np.array_equal(apply(f"div.{kind}", a, divisor, dtype=dtype), wrapped(quotients, dtype))
    rests = [x - q * y for (x, y), q in zip(pairs, quotients, strict=True)]
    assert np.array_equal(apply(f"rem.{kind}", a, divisor, dtype=dtype), wrapped(rests, dtype))


def test_mul_hi_64() -> None:
    a, b = integers(np.uint64), integers(np.uint64)[::-1].copy()
    expected = [int(x) * int(y) >> 64 for x, y in zip(a, b, strict=True)]
    assert np.array_equal(apply("mul.hi.u64", a, b, dtype=np.uint64), wrapped(expected, np.uint64))


COUNTS = np.array([0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 255, 2**31, 2**32 - 1] * 3, np.uint32)[:32]


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_shifts_clamp(bits: int) -> None:
    unsigned, signed = np.dtype(f"u{bits // 8}"), np.dtype(f"i{bits // 8}")
    a = integers(unsigned)
    left = [int(x) << min(int(n), bits) for x, n in zip(a, COUNTS, strict=True)]
    assert np.array_equal(apply(f"shl.b{bits}", a, COUNTS, dtype=unsigned), wrapped(left, unsigned))
    right = [int(x) >> min(int(n), bits) for x, n in zip(a, COUNTS, strict=True)]
    assert np.array_equal(apply(f"shr.u{bits}", a, COUNTS, dtype=unsigned), np.array(right))
    s = a.view(signed)
    arithmetic = [int(x) >> min(int(n), bits) for x, n in zip(s, COUNTS, strict=True)]
    assert np.array_equal(apply(f"shr.s{bits}", s, COUNTS, dtype=signed), np.array(arithmetic))


def test_funnel_shifts() -> None:
    low, high = integers(np.uint32), integers(np.uint32)[::-1].copy()
    for mode, limit in (("wrap", lambda n: n & 31), ("clamp", lambda n: min(n, 32))):
        pairs = [(int(h) << 32 | int(x), limit(int(n)))
                 for x, h, n in zip(low, high, COUNTS, strict=True)]  # fmt: skip
        left = wrapped([(v << n) >> 32 for v, n in pairs], np.uint32)
        right = wrapped([v >> n for v, n in pairs], np.uint32)
        assert np.array_equal(apply(f"shf.l.{mode}.b32", low, high, COUNTS, dtype=np.uint32), left)
        assert np.array_equal(apply(f"shf.r.{mode}.b32", low, high, COUNTS, dtype=np.uint32), right)


def _bfe(value: int, position: int, length: int, signed: bool, width: int) -> int:
    bits = [(value >> min(i, width - 1) if signed else (value >> i if i < width else 0)) & 1
            for i in range(position, position + length)]  # fmt: skip
    if signed and length:
        sign_at = min(position + length - 1, width - 1)
        sign = value >> sign_at & 1
        bits = [value >> i & 1 if i < width else sign for i in range(position, position + length)]
        bits += [sign] * width
    return sum(b << i for i, b in enumerate(bits[:width]))


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
def test_bit_field_extract(kind: str) -> None:
    width = int(kind[1:])
    a = integers(np.dtype(f"u{width // 8}"))
    position = RNG.integers(0, width, 32, dtype=np.uint32)
    length = RNG.integers(0, width + 1, 32, dtype=np.uint32)
    expected = [
        _bfe(int(x), int(p), int(n), kind[0] == "s", width)
        for x, p, n in zip(a, position, length, strict=True)
    ]
    assert np.array_equal(
        apply(f"bfe.{kind}", a, position, length, dtype=a.dtype), wrapped(expected, a.dtype)
    )


def test_bit_field_insert_and_logic() -> None:
    a, b, c = (integers(np.uint32) for _ in range(3))
    position = RNG.integers(0, 40, 32, dtype=np.uint32)
    length = RNG.integers(0, 33, 32, dtype=np.uint32)
    expected = []
    for x, y, p, n in zip(a, b, position, length, strict=True):
        mask = ((1 << int(n)) - 1) << int(p)
        expected.append(int(y) & ~mask | (int(x) << int(p)) & mask)
    result = apply("bfi.b32", a, b, position, length, dtype=np.uint32)
    assert np.array_equal(result, wrapped(expected, np.uint32))
    assert np.array_equal(apply("popc.b32", a, dtype=np.uint32), [int(x).bit_count() for x in a])
    assert np.array_equal(
        apply("clz.b32", a, dtype=np.uint32), [32 - int(x).bit_length() for x in a]
    )
    assert np.array_equal(
        apply("brev.b32", a, dtype=np.uint32), [int(f"{int(x):032b}"[::-1], 2) for x in a]
    )
    majority = a & b | b & c | a & c
    out = np.zeros(32, np.uint32)
    execute(
        """
        add.s64 %d4, %d1, %d30; ld.global.b32 %r1, [%d4];
        add.s64 %d5, %d2, %d30; ld.global.b32 %r2, [%d5];
        add.s64 %d6, %d3, %d30; ld.global.b32 %r3, [%d6];
        lop3.b32 %r4, %r1, %r2, %r3, 0xE8;
        add.s64 %d7, %d0, %d30; st.global.b32 [%d7], %r4;
        """, out, a, b, c,
    )  # fmt: skip
    assert np.array_equal(out, majority)


def test_permute_bytes() -> None:
    a, b = integers(np.uint32), integers(np.uint32)[::-1].copy()
    selector = RNG.integers(0, 1 << 16, 32, dtype=np.uint32)
    expected = []
    for x, y, s in zip(a, b, selector, strict=True):
        data = int(x).to_bytes(4, "little") + int(y).to_bytes(4, "little")
        octets = []
        for i in range(4):
            nibble = int(s) >> 4 * i & 15
            byte = data[nibble & 7]
            octets.append((255 if byte & 128 else 0) if nibble & 8 else byte)
        expected.append(int.from_bytes(bytes(octets), "little"))
    assert np.array_equal(apply("prmt.b32", a, b, selector, dtype=np.uint32), expected)


def test_min_and_max_prefer_numbers() -> None:
    a, b = floats(), shuffled_floats()
    result = apply("max.f32", a, b, dtype=np.float32)
    assert np.array_equal(result, np.fmax(a, b), equal_nan=True)
    result = apply("min.f32", a, b, dtype=np.float32)
    assert np.array_equal(result, np.fmin(a, b), equal_nan=True)
    result = apply("max.NaN.f32", a, b, dtype=np.float32)
    assert np.array_equal(result, np.maximum(a, b), equal_nan=True)


def test_fma_rounds_once() -> None:
    a = np.full(32, 1 + 2**-12, np.float32)
    c = np.full(32, -(1 + 2**-11), np.float32)
    assert (apply("fma.rn.f32", a, a, c, dtype=np.float32) == np.float32(2**-24)).all()


ORDERED = {"eq": np.equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
           "ge": np.greater_equal}  # fmt: skip


def test_float_comparisons_with_nan() -> None:
    a, b = floats(), shuffled_floats()
    b[:5] = a[:5]
    nan = np.isnan(a) | np.isnan(b)
    table = {
        **{name: fn(a, b) for name, fn in ORDERED.items()},
        **{name + "u": fn(a, b) | nan for name, fn in ORDERED.items()},
        "ne": (a != b) & ~nan, "neu": (a != b) | nan, "num": ~nan, "nan": nan,
    }  # fmt: skip
    for name, expected in table.items():
        result = apply(f"setp.{name}.f32", a, b, dtype=np.bool_)
        assert np.array_equal(result, expected), name


def test_integer_comparisons() -> None:
    a, b = integers(np.int32), integers(np.int32)[::-1].copy()
    b[:4] = a[:4]
    ua, ub = a.view(np.uint32), b.view(np.uint32)
    for name, fn in {**ORDERED, "ne": np.not_equal}.items():
        assert np.array_equal(apply(f"setp.{name}.s32", a, b, dtype=np.bool_), fn(a, b))
        assert np.array_equal(apply(f"setp.{name}.u32", ua, ub, dtype=np.bool_), fn(ua, ub))
    for name, fn in (("lo", np.less), ("hs", np.greater_equal)):
        assert np.array_equal(apply(f"setp.{name}.u32", ua, ub, dtype=np.bool_), fn(ua, ub))
    flag = RNG.integers(0, 2, 32).astype(np.bool_)
    result = apply("setp.lt.and.s32", a, b, flag, dtype=np.bool_)
    assert np.array_equal(result, (a < b) & flag)


def test_select() -> None:
    a, b = integers(np.uint32), integers(np.uint32)
    flag = RNG.integers(0, 2, 32).astype(np.bool_)
    assert np.array_equal(apply("selp.b32", a, b, flag, dtype=np.uint32), np.where(flag, a, b))
    c = integers(np.int32)
    assert np.array_equal(apply("slct.b32.s32", a, b, c, dtype=np.uint32), np.where(c >= 0, a, b))


def test_conversions() -> None:
    x = floats()
    y = shuffled_floats()
    half = x.astype(np.float16)
    packed = apply("cvt.rn.f16x2.f32", y, x, dtype=np.uint32)
    low = (packed & 0xFFFF).astype(np.uint16).view(np.float16)
    assert np.array_equal(low, half, equal_nan=True)
    back = apply("cvt.f32.f16", half.view(np.uint16), dtype=np.float32)
    assert np.array_equal(back, half.astype(np.float32), equal_nan=True)
    finite = np.where(np.isfinite(x), x, np.float32(2.5))
    result = apply("cvt.rni.s32.f32", np.array([0.5, 1.5, 2.5, -0.5] * 8, np.float32),
                   dtype=np.int32)  # fmt: skip
    assert result[:4].tolist() == [0, 2, 2, 0]
    big = apply("cvt.rzi.s32.f32", np.array([3e9, -3e9, np.nan, -1.9] * 8, np.float32),
                dtype=np.int32)  # fmt: skip
    assert big[:4].tolist() == [2**31 - 1, -(2**31), 0, -1]
    assert np.array_equal(apply("cvt.rmi.f32.f32", finite, dtype=np.float32), np.floor(finite))
    i = integers(np.int32)
    assert np.array_equal(apply("cvt.rn.f32.s32", i, dtype=np.float32), i.astype(np.float32))
    assert np.array_equal(apply("cvt.s64.s32", i, dtype=np.int64), i.astype(np.int64))
    assert np.array_equal(apply("cvt.s32.s8", i, dtype=np.int32), i.astype(np.int8))
    assert np.array_equal(apply("cvt.u64.u32", i.view(np.uint32), dtype=np.uint64),
                          i.view(np.uint32))  # fmt: skip


def test_bf16_rounds_to_nearest_even() -> None:
    torch = pytest.importorskip("torch")
    x, y = floats(), shuffled_floats()
    packed = apply("cvt.rn.bf16x2.f32", y, x, dtype=np.uint32)
    for bits, source in ((packed & 0xFFFF, x), (packed >> 16, y)):
        expected = torch.from_numpy(source).bfloat16().float().numpy()
        result = (bits << 16).astype(np.uint32).view(np.float32)
        assert np.array_equal(result, expected, equal_nan=True)


def test_approximate_functions() -> None:
    x = np.abs(floats())
    with np.errstate(all="ignore"):
        table = {
            "ex2.approx.ftz.f32": np.exp2(-x),
            "lg2.approx.f32": np.log2(x),
            "rcp.approx.f32": 1 / x,
            "rsqrt.approx.f32": 1 / np.sqrt(x),
            "sqrt.approx.f32": np.sqrt(x),
            "sin.approx.f32": np.sin(x),
            "cos.approx.f32": np.cos(x),
            "tanh.approx.f32": np.tanh(x),
        }
    for opcode, expected in table.items():
        source = -x if opcode.startswith("ex2") else x
        result = apply(opcode, source, dtype=np.float32)
        np.testing.assert_allclose(result, expected, rtol=1e-6, atol=2.0**-126)
    tiny = np.full(32, -130, np.float32)
    assert (apply("ex2.approx.ftz.f32", tiny, dtype=np.float32) == 0).all()
    assert (apply("ex2.approx.f32", tiny, dtype=np.float32) > 0).all()


def test_dot_product_of_bytes() -> None:
    a, b, c = integers(np.uint32), integers(np.uint32), integers(np.uint32)
    expected = (a & 0xFFFF) * (b & 0xFF) + (a >> 16) * (b >> 8 & 0xFF) + c
    assert np.array_equal(apply("dp2a.lo.u32.u32", a, b, c, dtype=np.uint32), expected)
