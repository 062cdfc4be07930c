"""Attention as a differentiable operation: plans, executes, and knows who computes gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hopperflash.plan import LaunchPlan, make_plan
from hopperflash.runtime.launch import execute
from hopperflash.streaming import streaming_attention


def attention(plan: LaunchPlan, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) of a forward plan.

    A plan without launches is that of the cpu backend, or of an empty problem on any backend; both
    are computed by `streaming_attention`, which has gradients.
    """
    if not plan.calls:
        problem = plan.problem
        return streaming_attention(
            q,
            k,
            v,
            problem.mask,
            softmax_scale=problem.softmax_scale,
            softcap=problem.softcap,
        )
    out, lse = _KernelAttention.apply(plan, q, k, v)  # type: ignore[no-untyped-call]
    return out, lse


class _KernelAttention(torch.autograd.Function):
    """The forward kernels of a plan."""

    @staticmethod
    def forward(ctx: Any, plan: LaunchPlan, q: Tensor, k: Tensor, v: Tensor) -> Any:
        ctx.plan = plan
        return execute(plan, q, k, v)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        # Refuses with every backend's reasons: none has backward kernels yet.
        make_plan(ctx.plan.problem, ctx.plan.arch, "backward")
