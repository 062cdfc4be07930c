"""Elements past 2^31 of their tensor: offsets are computed in 64 bits (failure kinds D38 to D42).

The memory is reserved, and only the pages that hold an element are ever touched.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from cutlass.cute.typing import SymInt
from torch import Tensor

import hopperflash
from hopperflash.problem import GRADIENTS

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
    operands = [torch.randn(3, 3, 3, 8).bfloat16() for _ in range(4)]
    compare(arch, operands, (0, 1, 2), hopperflash.flash_attn_func)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
def test_gradients_larger_than_31_bits(arch: str) -> None:
    """Written in place to memory whose heads are far apart."""
    q, k, v, dout = (torch.randn(1, 3, 3, 8).bfloat16() for _ in range(4))
    with hopperflash.emulate(arch, hazards="basic"):
        out, lse = hopperflash.flash_attn_func(q, k, v, return_lse=True)
        call = (dout, q, k, v, out, lse)
        wanted = hopperflash.flash_attn_backward(*call)
        memory = [spread(x, 2) for x in (q, k, v)]
        hopperflash.flash_attn_backward(*call, **dict(zip(GRADIENTS, memory, strict=True)))
    for found, want in zip(memory, wanted, strict=True):
        assert torch.equal(found, want)


def test_kernels_take_64_bit_strides() -> None:
    """Of every tensor, the fp32 sums and statistics among them: no offset is a 32-bit product."""
    q = torch.empty(2, 300, 4, 64, dtype=torch.float16, device="meta")
    packed = q[0]
    offsets = torch.empty(3, dtype=torch.int32, device="meta")
    lengths = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
    seen = 0
    for arch, direction in product(("sm_90a", "sm_80"), ("forward", "backward")):
        options: dict[str, Any] = {"arch": arch, "direction": direction}
        plans = [
            hopperflash.make_plan(q, q, q, **options),
            hopperflash.make_plan(packed, packed, packed, **lengths, **options),
        ]
        for spec in {call.spec for plan in plans for call in plan.calls}:
            kernel_class = getattr(importlib.import_module(spec.ref.module), spec.ref.name)
            kernel = kernel_class(spec.config, spec.signature, spec.dependent)
            for argument in kernel.fake_arguments():
                for stride in getattr(argument, "stride", ()):
                    if isinstance(stride, SymInt):
                        seen += 1
                        assert stride.width == 64, (spec.ref.name, argument)
    assert seen > 100


@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
def test_packed_tensors_larger_than_31_bits(arch: str) -> None:
    """The rows of the last sequence, and heads, each far apart."""
    cu_seqlens = torch.tensor([0, 1, 2, 3], dtype=torch.int32)

    def call(q: Tensor, k: Tensor, v: Tensor, out: Tensor | None = None) -> Tensor:
        return hopperflash.flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, 1, 1, out=out)

    operands = [torch.randn(3, 3, 8).bfloat16() for _ in range(4)]
    compare(arch, operands, (0, 1), call)
