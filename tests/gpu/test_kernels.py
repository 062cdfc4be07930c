"""The named cases on a GPU, and that repeated runs are equal there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import hopperflash
from hopperflash.problem import GRADIENTS
from tests.support.band_cases import BAND_CASES
from tests.support.cases import FORWARD_CASES, Case, check_forward, make_inputs
from tests.support.gradient_cases import BACKWARD_CASES, BackwardCase, check_backward
from tests.support.packed_cases import PACKED_CASES, PackedCase, check_packed, compute

pytestmark = pytest.mark.gpu

CASE = Case("gpu", seqlen_q=333, seqlen_k=500, heads_q=4, heads_k=2, head_dim=128, head_dim_v=128)


def on_gpu(q: Tensor, k: Tensor, v: Tensor, /, **options: Any) -> tuple[Tensor, Tensor]:
    """`flash_attn_func` on the GPU, with results brought back."""
    out, lse = hopperflash.flash_attn_func(*(x.cuda() for x in (q, k, v)), **options)
    return out.cpu(), lse.cpu()


@pytest.mark.parametrize("case", FORWARD_CASES, ids=str)
def test_forward_matches_fp64(case: Case) -> None:
    check_forward(case, on_gpu)


@pytest.mark.parametrize("case", [*BACKWARD_CASES, *BAND_CASES], ids=str)
def test_backward_matches_fp64(case: BackwardCase) -> None:
    check_forward(case, on_gpu)
    check_backward(case, on_gpu)


@pytest.mark.parametrize("case", PACKED_CASES, ids=str)
def test_packed_sequences_match_fp64(case: PackedCase) -> None:
    check_packed(case, compute(case, "cuda"))


def test_repeated_runs_are_equal() -> None:
    q, k, v = (x.cuda() for x in make_inputs(CASE))
    first = hopperflash.flash_attn_func(q, k, v, causal=True)
    for _ in range(100):
        assert torch.equal(first, hopperflash.flash_attn_func(q, k, v, causal=True))


@pytest.mark.parametrize("causal", [False, True])
def test_a_margin_changes_no_bit(causal: bool) -> None:
    """Few CTAs with many tiles, many with few, and one alone, which take turns at dQ."""
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    leaves = [x.cuda().requires_grad_() for x in make_inputs(replace(CASE, batch=8))]
    results = []
    for margin in (0, 1, sms // 2, sms - 3, sms - 1):
        options: dict[str, Any] = {"causal": causal, "deterministic": True, "sm_margin": margin}
        out = hopperflash.flash_attn_func(*leaves, **options)
        results.append((out, *torch.autograd.grad(out, leaves, torch.ones_like(out))))
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("head_dim", [128, 256])
def test_deterministic_gradients_are_equal_in_every_run(head_dim: int) -> None:
    """Several key tiles add to each tile of dQ, and two query heads to each tile of dK and dV."""
    case = replace(CASE, head_dim=head_dim, head_dim_v=head_dim)
    leaves = [x.cuda().requires_grad_() for x in make_inputs(case)]
    out = hopperflash.flash_attn_func(*leaves, causal=True, deterministic=True)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)

    def gradients() -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, leaves, dout, retain_graph=True)

    first = gradients()
    assert all(gradient.abs().max() > 0 for gradient in first)
    for run in range(1000):
        for name, want, got in zip(GRADIENTS, first, gradients(), strict=True):
            assert torch.equal(got, want), f"{name} of run {run} differs"
