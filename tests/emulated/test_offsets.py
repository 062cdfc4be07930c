"""Elements past 2^31 of their tensor: offsets are computed in 64 bits (failure kinds D38 to D42).

The memory is reserved, and only the pages that hold an element are ever touched.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import hopperflash

pytestmark = [pytest.mark.emulated, pytest.mark.xdist_group("offsets")]

FAR = 2**30 + 64  # elements from one index to the next: the third lies past 2^31


def spread(x: Tensor, dim: int) -> Tensor:
    """The same values, `FAR` elements apart along a dimension."""
    strides = list(x.stride())
    strides[dim] = FAR
    reach = sum((n - 1) * stride for n, stride in zip(x.shape, strides, strict=True))
    try:
        memory = torch.empty(reach + 1, dtype=x.dtype)
    except RuntimeError as error:
        pytest.skip(f"{2 * reach:,} B of address space cannot be reserved: {error}")
    return memory.as_strided(x.shape, strides).copy_(x)


def compare(
    arch: str, operands: list[Tensor], dims: tuple[int, ...], call: Callable[..., Tensor]
) -> None:
    """With all operands spread, results and gradients stay as they are."""

    def results(inputs: list[Tensor], out: Tensor) -> list[Tensor]:
        q, k, v, dout = inputs
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        with hopperflash.emulate(arch, hazards="basic"):
            attended = call(*leaves)
            gradients = torch.autograd.grad(attended, leaves, dout)
            with torch.no_grad():
                call(q, k, v, out=out)
        return [attended.detach(), *gradients, out]

    wanted = results(operands, torch.empty_like(operands[3]))
    for dim in dims:
        *inputs, out = (spread(x, dim) for x in (*operands, operands[3]))
        for found, want in zip(results(inputs, out), wanted, strict=True):
            assert torch.equal(found, want), f"spread along {dim}"


@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
def test_dense_tensors_larger_than_31_bits(arch: str) -> None:
    """Batch entries, rows and heads, each far apart."""
    operands = [torch.randn(3, 3, 3, 8).half() for _ in range(4)]
    compare(arch, operands, (0, 1, 2), hopperflash.flash_attn_func)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
def test_packed_tensors_larger_than_31_bits(arch: str) -> None:
    """The rows of the last sequence, and heads, each far apart."""
    cu_seqlens = torch.tensor([0, 1, 2, 3], dtype=torch.int32)

    def call(q: Tensor, k: Tensor, v: Tensor, out: Tensor | None = None) -> Tensor:
        return hopperflash.flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, 1, 1, out=out)

    operands = [torch.randn(3, 3, 8).half() for _ in range(4)]
    compare(arch, operands, (0, 1), call)
