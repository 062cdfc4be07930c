"""Attention as a differentiable operation: plans, executes, and knows who computes gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hopperflash.errors import UnsupportedProblem
from hopperflash.packed import packed_attention
from hopperflash.plan import LaunchPlan, make_plan
from hopperflash.problem import GRADIENTS, AttnProblem, backward_problem
from hopperflash.runtime import emulation
from hopperflash.runtime.launch import execute
from hopperflash.runtime.tensors import facts
from hopperflash.streaming import streaming_attention


def attention(
    plan: LaunchPlan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Mapping[str, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of a forward plan; `lengths` are those of packed sequences, in a batch of one.

    A plan without launches is that of the cpu backend, or of an empty problem on any backend; both
    are computed by `streaming_attention`, which has gradients.
    """
    if not plan.calls:
        return _without_kernels(plan.problem, q, k, v, lengths)
    out, lse = _KernelAttention.apply(plan, lengths or {}, q, k, v)  # type: ignore[no-untyped-call]
    return out, lse


def _without_kernels(
    problem: AttnProblem, q: Tensor, k: Tensor, v: Tensor, lengths: Mapping[str, Tensor] | None
) -> tuple[Tensor, Tensor]:
    scales = {"softmax_scale": problem.softmax_scale, "softcap": problem.softcap}
    if lengths is None:
        return streaming_attention(q, k, v, problem.mask, **scales)
    if problem.is_empty:
        # No row sees a key, whatever the lengths say, which may be on a GPU.
        return streaming_attention(q, k[:, :0], v[:, :0], problem.mask, **scales)
    return packed_attention(q, k, v, lengths, problem.mask, **scales)


class _KernelAttention(torch.autograd.Function):
    """The kernels of a plan, forward and backward; saves q, k, v, out and lse, nothing quadratic.

    The backward runs where the forward ran, also when it is called after `emulate` has ended.
    """

    @staticmethod
    def forward(
        ctx: Any,
        plan: LaunchPlan,
        lengths: Mapping[str, Tensor],
        q: Tensor,
        k: Tensor,
        v: Tensor,
    ) -> Any:
        ctx.plan, ctx.session = plan, emulation.session_of(q.device)
        ctx.lengths = tuple(lengths)
        ctx.set_materialize_grads(False)
        results = execute(plan, {"q": q, "k": k, "v": v, **lengths}, ctx.session)
        ctx.save_for_backward(q, k, v, results["out"], results["lse"], *lengths.values())
        return results["out"], results["lse"]

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:
        needed = tuple(
            name for name, wanted in zip(GRADIENTS, ctx.needs_input_grad[2:], strict=True) if wanted
        )
        if not needed or (dout is None and dlse is None):
            return None, None, None, None, None
        q, k, v, out, lse, *lengths = ctx.saved_tensors
        operands = {
            "q": q,
            "k": k,
            "v": v,
            "out": out,
            "dout": torch.zeros_like(out) if dout is None else dout,
            "lse": lse,
            "dlse": torch.zeros_like(lse) if dlse is None else dlse.contiguous(),
            **dict(zip(ctx.lengths, lengths, strict=True)),
        }
        problem = backward_problem(
            ctx.plan.problem,
            [(name, facts(operands[name])) for name in ("q", "k", "v", "dout", "out")],
            needed,
        )
        plan = make_plan(problem, ctx.plan.arch, "backward", ctx.plan.requested)
        with torch.no_grad():
            gradients = execute(plan, operands, ctx.session)
        if torch.is_grad_enabled():  # create_graph: a second derivative may be asked for
            inputs = (q, k, v, *(x for x in (dout, dlse) if x is not None))
            guarded = _FirstOrderOnly.apply(  # type: ignore[no-untyped-call]
                len(needed), *(gradients[name] for name in needed), *inputs
            )
            gradients = dict(zip(needed, guarded, strict=True))
        return None, None, *(gradients.get(name) for name in GRADIENTS)


class _FirstOrderOnly(torch.autograd.Function):
    """Gradients that depend on inputs in a way that is not differentiated.

    `once_differentiable` would drop that dependence in silence where dO needs no gradient.
    """

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> Any:
        return tuple(tensor.view_as(tensor) for tensor in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise UnsupportedProblem(
            "no second derivatives: cannot differentiate twice through the kernels; the formula of"
            " hopperflash.reference.materialized_attention can be"
        )
