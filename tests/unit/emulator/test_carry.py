"""Arithmetic through the condition code against Python's integers."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.ptx import execute

RNG = np.random.default_rng(17)


def words(count: int) -> NDArray[np.uint32]:
    """[count, 32] words with the values where carries turn; the last column is all ones."""
    values = RNG.integers(0, 2**32, (count, 32), dtype=np.uint64).astype(np.uint32)
    values[:, :8] = RNG.choice(np.array([0, 1, 2**31, 2**32 - 1], np.uint32), (count, 8))
    values[:, -1] = 2**32 - 1
    return values


def number(limbs: NDArray[np.uint32], lane: int) -> int:
    return sum(int(limb) << 32 * i for i, limb in enumerate(limbs[:, lane]))


def run(lines: list[str], results: int, *sources: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Source s is in registers %r{20 + 10 s}..., the result is stored from %r10..."""
    out = np.zeros((results, 32), np.uint32)
    body = []
    for s, source in enumerate(sources):
        body.append(f"add.s64 %d20, %d{s + 1}, %d30;")
        body += [
            f"ld.global.b32 %r{20 + 10 * s + i}, [%d20+{128 * i}];" for i in range(len(source))
        ]
    body += [*lines, "add.s64 %d21, %d0, %d30;"]
    body += [f"st.global.b32 [%d21+{128 * i}], %r{10 + i};" for i in range(results)]
    execute("\n".join(body), out, *(np.ascontiguousarray(s) for s in sources))
    return out


@pytest.mark.parametrize("kind", ["u32", "s32"])
@pytest.mark.parametrize(("name", "sign"), [("add", 1), ("sub", -1)])
def test_long_sums(name: str, sign: int, kind: str) -> None:
    a, b = words(4), words(4)
    lines = [f"{name}.cc.{kind} %r10, %r20, %r30;"]
    lines += [f"{name}c.cc.{kind} %r{10 + i}, %r{20 + i}, %r{30 + i};" for i in (1, 2, 3)]
    lines.append(f"{name}c.{kind} %r14, 0, 0;")
    out = run(lines, 5, a, b)
    for lane in range(32):
        assert number(out, lane) == (number(a, lane) + sign * number(b, lane)) % 2**160


def test_sums_in_place_keep_the_old_operands_for_the_carry() -> None:
    a, b = words(2), words(2)
    lines = ["add.cc.u32 %r20, %r20, %r30; addc.cc.u32 %r21, %r31, %r21; addc.u32 %r12, 0, 0;",
             "mov.b32 %r10, %r20; mov.b32 %r11, %r21;"]  # fmt: skip
    out = run(lines, 3, a, b)
    for lane in range(32):
        assert number(out, lane) == number(a, lane) + number(b, lane)


def test_long_products() -> None:
    """128 bits of a 64-bit product, as compilers multiply."""
    a, b = words(2), words(2)
    lines = """
        mul.lo.u32 %r10, %r20, %r30; mul.hi.u32 %r11, %r20, %r30;
        mad.lo.cc.u32 %r11, %r20, %r31, %r11; madc.hi.u32 %r12, %r20, %r31, 0;
        mad.lo.cc.u32 %r11, %r21, %r30, %r11; madc.hi.cc.u32 %r12, %r21, %r30, %r12;
        madc.hi.u32 %r13, %r21, %r31, 0; mad.lo.cc.u32 %r12, %r21, %r31, %r12;
        addc.u32 %r13, %r13, 0;
    """
    out = run([lines], 4, a, b)
    for lane in range(32):
        assert number(out, lane) == number(a, lane) * number(b, lane)


@pytest.mark.parametrize("kind", ["s32", "s64"])
def test_high_halves_of_signed_products(kind: str) -> None:
    bits = int(kind[1:])
    a, b, c = (RNG.integers(-(2 ** (bits - 1)), 2 ** (bits - 1), 32, dtype=np.int64)
               for _ in range(3))  # fmt: skip
    dtype = np.dtype(f"i{bits // 8}")
    out, carry = np.zeros(32, dtype), np.zeros(32, np.uint32)
    r, lanes = ("%r", "%d30") if bits == 32 else ("%d", "%d31")
    sources = "".join(f"add.s64 %d20, %d{i + 2}, {lanes}; ld.global.b{bits} {r}1{i}, [%d20];"
                      for i in range(3))  # fmt: skip
    body = f"""
        {sources} mad.hi.cc.{kind} {r}15, {r}10, {r}11, {r}12; addc.u32 %r9, 0, 0;
        add.s64 %d21, %d0, {lanes}; st.global.b{bits} [%d21], {r}15;
        add.s64 %d21, %d1, %d30; st.global.b32 [%d21], %r9;
    """
    execute(body, out, carry, a.astype(dtype), b.astype(dtype), c.astype(dtype))
    for lane in range(32):
        high = (int(a[lane]) * int(b[lane]) >> bits) % 2**bits
        total = high + int(c[lane]) % 2**bits
        assert int(out[lane]) % 2**bits == total % 2**bits
        assert carry[lane] == total >> bits


def test_a_guarded_sum_leaves_the_carry_of_others_alone() -> None:
    ones = np.full((1, 32), 2**32 - 1, np.uint32)
    lines = ["add.cc.u32 %r9, %r20, %r20; setp.lt.u32 %p1, %r0, 9;",
             "@%p1 add.cc.u32 %r9, 1, 1; addc.u32 %r10, 0, 0;"]  # fmt: skip
    assert np.array_equal(run(lines, 1, ones)[0], np.arange(32) >= 9)
