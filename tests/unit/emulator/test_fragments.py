"""Fragment layouts against the PTX tables, element by element."""

import numpy as np
import pytest

from hopperflash.emulator import fragments
from hopperflash.emulator.element_types import from_float32, to_float32

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("warps", [1, 4, 8])
@pytest.mark.parametrize("n", [8, 24, 256])
def test_accumulator(warps, n):
    matrix = RNG.standard_normal((16 * warps, n)).astype(np.float32)
    registers = fragments.pack_accumulator(matrix)
    assert registers.shape == (n // 2, 32 * warps)
    for i in range(n // 2):
        for t in range(32 * warps):
            row = 16 * (t // 32) + (t % 32) // 4 + 8 * ((i // 2) % 2)
            column = 8 * (i // 4) + 2 * (t % 4) + i % 2
            assert registers[i, t] == matrix[row, column]
    assert np.array_equal(fragments.unpack_accumulator(registers), matrix)


@pytest.mark.parametrize("n", [8, 64])
def test_half_accumulator(n):
    matrix = RNG.integers(0, 1 << 16, (64, n), dtype=np.uint16)
    registers = fragments.pack_half_accumulator(matrix)
    for i in range(n // 4):
        for t in range(128):
            row = 16 * (t // 32) + (t % 32) // 4 + 8 * (i % 2)
            column = 8 * (i // 2) + 2 * (t % 4)
            assert registers[i, t] & 0xFFFF == matrix[row, column]
            assert registers[i, t] >> 16 == matrix[row, column + 1]
    assert np.array_equal(fragments.unpack_half_accumulator(registers), matrix)


@pytest.mark.parametrize(("dtype", "steps"), [("bf16", 1), ("f16", 3), ("tf32", 1), ("s8", 2)])
def test_a_operand(dtype, steps):
    itemsize = {"bf16": 2, "f16": 2, "tf32": 4, "s8": 1}[dtype]
    per = 4 // itemsize
    registers = RNG.integers(0, 1 << 32, (4 * steps, 128), dtype=np.uint32)
    if dtype != "s8":  # keep exponents finite
        registers &= np.uint32(0xBFFFBFFF)
    a = fragments.fragment_a(registers, dtype)
    assert a.shape == (64, steps * 32 // itemsize)
    elements = registers.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[itemsize])
    values = to_float32(elements, dtype).reshape(4 * steps, 128, per)
    for j in range(4 * steps):
        for t in range(128):
            row = 16 * (t // 32) + (t % 32) // 4 + 8 * (j % 2)
            k = (j // 2) * 4 * per + per * (t % 4)
            assert np.array_equal(a[row, k : k + per], values[j, t])


@pytest.mark.parametrize("count", [1, 2])
def test_mma_b_operand(count):
    registers = RNG.integers(0, 1 << 32, (count, 64), dtype=np.uint32) & np.uint32(0xBFFFBFFF)
    b = fragments.fragment_b(registers, "bf16")
    assert b.shape == (2, 8, 8 * count)
    halves = to_float32(registers.view(np.uint16), "bf16").reshape(count, 64, 2)
    for j in range(count):
        for t in range(64):
            lane = t % 32
            k = 8 * j + 2 * (lane % 4)
            assert np.array_equal(b[t // 32, lane // 4, k : k + 2], halves[j, t])


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_rows_of_matrices(count, transposed):
    """Row r of matrix j is row 8j + r of its warp; lane 4r + c has elements 2c, 2c + 1 of it."""
    elements = RNG.integers(0, 1 << 16, (2, count, 8, 8), dtype=np.uint16)
    rows = elements.reshape(-1, 8).view(np.uint32)
    registers = fragments.from_rows(rows, count, transposed)
    halves = registers.view(np.uint16).reshape(count, 64, 2)
    for j in range(count):
        for t in range(64):
            for half in range(2):
                at = (t % 32 // 4, 2 * (t % 4) + half)
                expected = elements[t // 32, j][at[::-1] if transposed else at]
                assert halves[j, t, half] == expected
    assert np.array_equal(fragments.to_rows(registers, transposed), rows)


def test_float8_values():
    torch = pytest.importorskip("torch")
    codes = np.arange(256, dtype=np.uint8)
    for name, dtype in (("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)):
        expected = torch.from_numpy(codes).view(dtype).float().numpy()
        assert np.array_equal(to_float32(codes, name), expected, equal_nan=True)


@pytest.mark.parametrize("name", ["bf16", "f16"])
def test_rounding_is_to_nearest_even(name):
    torch = pytest.importorskip("torch")
    values = RNG.standard_normal(4096).astype(np.float32) * 100
    values[:4] = [np.inf, -np.inf, 1e30, 1 + 2**-8]
    dtype = {"bf16": torch.bfloat16, "f16": torch.float16}[name]
    expected = torch.from_numpy(values).to(dtype).view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(from_float32(values, name), expected)
    assert np.isnan(to_float32(from_float32(np.float32([np.nan]), name), name))[0]
