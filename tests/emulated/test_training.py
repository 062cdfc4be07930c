"""A small GPT learns from real text, its attention ours or torch's own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import hopperflash
from tests.support.operators import compiled_with_counter
from tests.support.small_gpt import LAYERS, train

STEPS = 50


def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return hopperflash.flash_attn_func(q, k, v, causal=True)


def torchs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def test_fifty_traced_steps_follow_torchs_own_attention() -> None:
    counters = []

    def traced(model):
        run, counter = compiled_with_counter(model)
        counters.append(counter)
        return run

    sizes = {"steps": STEPS, "batch": 8, "seqlen": 96}
    losses = train(ours, **sizes, compiled=traced)
    want = train(torchs, **sizes)
    assert losses[-1] < 0.7 * losses[0]
    assert losses == pytest.approx(want, rel=0.02)
    assert counters[0].frame_count == 1


@pytest.mark.emulated
@pytest.mark.xdist_group("bf16-64")
def test_a_few_steps_with_the_emulated_kernels() -> None:
    sizes = {"steps": 3, "batch": 2, "seqlen": 96}
    with hopperflash.emulate("sm_90a") as run:
        losses = train(ours, **sizes)
    assert losses == pytest.approx(train(torchs, **sizes), rel=0.01)
    assert losses[-1] < losses[0]
    assert run.hazards == []
    names = [launch.kernel_name.split("_")[1] for launch in run.launches]
    assert (names.count("fwd"), names.count("bwd")) == (3 * LAYERS, 3 * 3 * LAYERS)


@pytest.mark.emulated
@pytest.mark.xdist_group("bf16-64")
def test_traced_steps_with_the_emulated_kernels() -> None:
    """What was traced outside runs the kernels inside, forward and backward."""
    traced, _ = compiled_with_counter(ours)
    q, k, v = (torch.randn(1, 70, 2, 32).bfloat16().requires_grad_() for _ in "qkv")
    want = torch.autograd.grad(traced(q, k, v).float().square().sum(), (q, k, v))
    with hopperflash.emulate("sm_90a") as run:
        got = torch.autograd.grad(traced(q, k, v).float().square().sum(), (q, k, v))
    assert [launch.kernel_name.split("_")[1] for launch in run.launches] == ["fwd", *["bwd"] * 3]
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=0.05, atol=0.05)
