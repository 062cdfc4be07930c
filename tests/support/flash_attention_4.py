"""Runs flash-attn-4's forward and backward for sm_90 in the emulator and compares with float64.

    python -m tests.support.flash_attention_4 SCHEDULE HEAD_DIM CAUSAL

A script: it makes torch and CuTe DSL believe that CPU tensors are on a Hopper GPU.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from hopperflash.emulator import EmulationRun
from tests.support.posing import emulate_everything, pose_as_gpu


def attention(q: Any, k: Any, v: Any, causal: bool) -> torch.Tensor:
    """The materialised formula; (batch, sequence, heads, head dim)."""
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / q.shape[-1] ** 0.5
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)


def main(schedule: str, head_dim: int, causal: bool) -> None:
    """Fails where a result is far from float64 or a hazard was seen."""
    pose_as_gpu(9, 0)
    run = EmulationRun()
    emulate_everything(run, schedule)
    from flash_attn.cute import interface

    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 256, 2, head_dim).bfloat16() for _ in range(3))
    out, lse, *_ = interface._flash_attn_fwd(q, k, v, causal=causal, return_lse=True)
    grad = torch.randn_like(out)
    grads = interface._flash_attn_bwd(q, k, v, out, grad, lse, causal=causal)[:3]
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    expected = attention(*leaves, causal)
    expected.backward(grad.double())
    pairs = zip((out, *grads), (expected, *(x.grad for x in leaves)), strict=True)
    for name, (got, wanted) in zip(("O", "dQ", "dK", "dV"), pairs, strict=True):
        error = float((got.double() - wanted).norm() / wanted.norm())
        print(f"{name} relative error {error:.1e}")
        assert error < 5e-3, name
    print(run.report())
    assert not run.hazards, run.hazards


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3] == "1")
