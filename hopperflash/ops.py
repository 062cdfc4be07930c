"""Attention as a differentiable operation: plans, executes, and knows who computes gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hopperflash.errors import UnsupportedProblem
from hopperflash.packed import packed_attention, packed_gradients
from hopperflash.plan import LaunchPlan, make_plan
from hopperflash.problem import GRADIENTS, AttnProblem, backward_problem
from hopperflash.problem.lengths import LENGTHS
from hopperflash.runtime import emulation
from hopperflash.runtime.launch import execute
from hopperflash.runtime.tensors import facts
from hopperflash.streaming import streaming_attention, streaming_gradients


def attention(plan: LaunchPlan, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """(out, lse) of a forward plan, of packed sequences in a batch of one.

    `tensors` holds q, k, v, the lengths of packed sequences, and "out" where memory for it was
    given, which gradients cannot pass. A plan without launches is that of the cpu backend, or of an
    empty problem on any backend; both are computed by `streaming_attention`, which has gradients.
    """
    q, k, v = (tensors[name] for name in ("q", "k", "v"))
    lengths = {name: tensors[name] for name in LENGTHS if name in tensors}
    if "out" in tensors:
        with torch.no_grad():
            if plan.calls:
                results = execute(plan, tensors, emulation.session_of(q.device))
                return results["out"], results["lse"]
            out, lse = _without_kernels(plan.problem, q, k, v, lengths)
            return tensors["out"].copy_(out), lse
    if not plan.calls:
        return _without_kernels(plan.problem, q, k, v, lengths)
    out, lse = _KernelAttention.apply(plan, lengths, q, k, v)  # type: ignore[no-untyped-call]
    return out, lse


def gradients(plan: LaunchPlan, tensors: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """(dq, dk, dv) of a backward plan, written to memory of those names where it is given.

    `tensors` holds what a forward took and gave, "dout", and "dlse" where the LSE is used.
    """
    problem, q, lse = plan.problem, tensors["q"], tensors["lse"]
    with torch.no_grad():
        if plan.calls:
            operands = {"dlse": torch.zeros_like(lse), **tensors}
            results = execute(plan, operands, emulation.session_of(q.device))
            return tuple(results[name] for name in GRADIENTS)
        scales = {"softmax_scale": problem.softmax_scale, "softcap": problem.softcap}
        lengths = {name: tensors[name] for name in LENGTHS if name in tensors}
        operands = {name: x for name, x in tensors.items() if name not in (*LENGTHS, *GRADIENTS)}
        if problem.is_empty:
            results = {f"d{name}": torch.zeros_like(tensors[name]) for name in ("q", "k", "v")}
        elif problem.is_packed:
            results = packed_gradients(operands, lengths, problem.mask, **scales)
        else:
            results = streaming_gradients(operands, problem.mask, **scales)
        return tuple(
            tensors[name].copy_(results[name]) if name in tensors else results[name]
            for name in GRADIENTS
        )


def _without_kernels(
    problem: AttnProblem, q: Tensor, k: Tensor, v: Tensor, lengths: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor]:
    scales = {"softmax_scale": problem.softmax_scale, "softcap": problem.softcap}
    if problem.is_empty:
        # No row sees a key, whatever the lengths say, which may be on a GPU.
        return streaming_attention(q, k[:, :0], v[:, :0], problem.mask, **scales)
    if problem.is_packed:
        return packed_attention(q, k, v, lengths, problem.mask, **scales)
    return streaming_attention(q, k, v, problem.mask, **scales)


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
            "dlse": torch.zeros_like(lse) if dlse is None else dlse,
            **dict(zip(ctx.lengths, lengths, strict=True)),
        }
        problem = backward_problem(
            ctx.plan.problem,
            [(name, facts(operands[name])) for name in ("q", "k", "v", "dout", "out", "dlse")],
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
