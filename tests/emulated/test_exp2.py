"""2^x without the MUFU, on the device, against fp64."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
import pytest
import torch
from cutlass import Float32
from hopperflash.kernels.common.softmax import exp2_by_fma

from hopperflash import emulator
from tests.support.sample_kernels import compile_kernel, fake_matrix

pytestmark = [pytest.mark.emulated, pytest.mark.xdist_group("block-range")]

THREADS = 128
COLUMNS = 8


class Exp2Kernel:
    """One thread a row of (rows, COLUMNS)."""

    @cute.jit
    def __call__(self, mX: cute.Tensor, mPower: cute.Tensor, stream: Any) -> None:
        grid = (cute.ceil_div(mX.shape[0], THREADS), 1, 1)
        self.kernel(mX, mPower).launch(grid=grid, block=(THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, mX: cute.Tensor, mPower: cute.Tensor) -> None:
        tidx, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        row = block * THREADS + tidx
        if row < mX.shape[0]:
            for i in range(COLUMNS):
                mPower[row, i] = exp2_by_fma(mX[row, i])


def power_of_two(x: torch.Tensor) -> torch.Tensor:
    """2^x of a vector, from the device."""
    kernel = compile_kernel(Exp2Kernel(), *(fake_matrix(Float32) for _ in "io"))
    rows = x.reshape(-1, COLUMNS)
    found = torch.full_like(rows, torch.nan)
    assert emulator.launch(kernel, rows, found).hazards == []
    return found.reshape(-1)


def test_exp2_is_as_exact_as_the_mufu() -> None:
    """ex2.approx has a relative error of 2^-22 over its range; halves are where f is largest."""
    drawn = -126.0 * torch.rand(20000, generator=torch.Generator().manual_seed(0))
    halves = torch.arange(252) / -2.0
    near = torch.cat([halves, halves * (1 + 2.0**-23), halves * (1 - 2.0**-23)])
    x = torch.cat([drawn, near[near >= -126.0]])
    x = x[: len(x) // COLUMNS * COLUMNS]
    want = torch.exp2(x.double())
    assert ((power_of_two(x).double() - want).abs() / want).max() < 2.0**-22


def test_exp2_at_the_ends() -> None:
    """Exactly 1 for a maximum that stays, 0 for one that was -inf, as good as 0 below 2^-126."""
    x = torch.tensor([0.0, -0.0, -torch.inf, -127.0, -1e30, -126.7, -1.0, -126.0])
    *exact, small, half, least = power_of_two(x).tolist()
    assert exact == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert 0.0 <= small < 2.0**-126
    assert (half, least) == (0.5, 2.0**-126)
