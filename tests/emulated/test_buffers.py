"""The kernels write to given memory, in place where they can, and touch nothing beside it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import hopperflash

pytestmark = [pytest.mark.emulated, pytest.mark.xdist_group("buffers")]

OFFSETS_Q, OFFSETS_K = torch.tensor([0, 5, 70]), torch.tensor([0, 60, 90])


def inside(x: Tensor, stride: int = 1) -> tuple[Tensor, Tensor]:
    """(memory, view) of the shape of `x`, every `stride`-th element of rows between NaN."""
    rows, heads, head_dim = x.shape
    memory = torch.full((rows + 2, heads + 1, head_dim * stride + 16), torch.nan).to(x.dtype)
    return memory, memory[1:-1, :heads, 8:-8:stride]


def attended(operands: list[Tensor], arch: str, stride: int | None) -> dict[str, Tensor]:
    """Output and gradients, in memory of their own or given memory."""
    q, k, v, dout = operands
    memory = {}
    if stride is not None:
        like = {"out": dout, "dq": q, "dk": k, "dv": v}
        memory = {name: inside(x, stride) for name, x in like.items()}
    views = {name: view for name, (_, view) in memory.items()}
    lengths = {"cu_seqlens_q": OFFSETS_Q, "cu_seqlens_k": OFFSETS_K}
    with hopperflash.emulate(arch) as run:
        out, lse = hopperflash.flash_attn_varlen_func(
            *(q, k, v, OFFSETS_Q, OFFSETS_K, 65, 60),
            causal=True,
            return_lse=True,
            out=views.pop("out", None),
        )
        options: dict[str, Any] = {"causal": True, **lengths, **views}
        gradients = hopperflash.flash_attn_backward(dout, q, k, v, out, lse, **options)
    assert run.hazards == []
    results = dict(zip(("out", "dq", "dk", "dv"), (out, *gradients), strict=True))
    for name, (whole, view) in memory.items():
        assert results[name].data_ptr() == view.data_ptr()
        assert whole.isnan().sum() == whole.numel() - view.numel(), f"{name}: wrote beside it"
    return results


@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
def test_given_memory_holds_the_same(arch: str) -> None:
    operands = [torch.randn(70, 2, 64), torch.randn(90, 2, 64), torch.randn(90, 2, 64)]
    operands = [x.bfloat16() for x in (*operands, torch.randn(70, 2, 64))]
    fresh = attended(operands, arch, None)
    for stride in (1, 2):
        for name, result in attended(operands, arch, stride).items():
            assert torch.equal(result, fresh[name]), (name, stride)


@pytest.mark.parametrize(("stride", "copied"), [(1, []), (2, ["dq", "dk", "dv"])])
def test_the_plan_says_what_is_copied(stride: int, copied: list[str]) -> None:
    q, k = torch.zeros(70, 2, 64).bfloat16(), torch.zeros(90, 2, 64).bfloat16()
    plan = hopperflash.make_plan(
        *(q, k, k),
        arch="sm_90a",
        direction="backward",
        cu_seqlens_q=OFFSETS_Q,
        cu_seqlens_k=OFFSETS_K,
        **{name: inside(x, stride)[1] for name, x in (("dq", q), ("dk", k), ("dv", k))},
    )
    assert [copy.operand for copy in plan.copies_back] == copied
