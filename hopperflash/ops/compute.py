"""What computes an accepted call: the kernels of its plan, or streaming code for CPU tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from hopperflash.calls import INPUTS, Call
from hopperflash.packed import packed_attention, packed_gradients
from hopperflash.problem import GRADIENTS, AttnProblem
from hopperflash.problem.lengths import LENGTHS
from hopperflash.runtime import emulation
from hopperflash.runtime.launch import execute
from hopperflash.streaming import streaming_attention, streaming_gradients


@torch.no_grad()
def compute(call: Call) -> dict[str, Tensor]:
    """The results of a call by name, contiguous or in the memory it gave; packed as it was given.

    A plan without launches is that of the cpu backend, or of an empty problem on any backend.
    """
    plan, tensors = call.plan, dict(call.tensors)
    if call.direction == "backward":
        tensors.setdefault("dlse", torch.zeros_like(tensors["lse"]))
    if plan.calls:
        results = execute(plan, tensors, emulation.session_of(tensors["q"].device))
    else:
        results = _attention(call) if call.direction == "forward" else _gradients(call)
        for name, result in results.items():
            results[name] = tensors[name].copy_(result) if name in tensors else result.contiguous()
    return {name: call.as_given(result) for name, result in results.items()}


def _attention(call: Call) -> dict[str, Tensor]:
    problem, (q, k, v) = call.problem, (call.tensors[name] for name in INPUTS)
    if problem.is_empty:
        # No row sees a key, whatever the lengths say, which may be on a GPU.
        k, v = k[:, :0], v[:, :0]
    if problem.is_packed and not problem.is_empty:
        out, lse = packed_attention(q, k, v, _lengths(call), problem.mask, **_scales(problem))
    else:
        out, lse = streaming_attention(q, k, v, problem.mask, **_scales(problem))
    return {"out": out, "lse": lse}


def _gradients(call: Call) -> dict[str, Tensor]:
    problem, tensors = call.problem, call.tensors
    if problem.is_empty:
        return {name: torch.zeros_like(tensors[name[1:]]) for name in problem.gradients}
    operands = {name: x for name, x in tensors.items() if name not in (*LENGTHS, *GRADIENTS)}
    wanted, scales = problem.gradients, _scales(problem)
    if problem.is_packed:
        lengths = _lengths(call)
        return packed_gradients(operands, lengths, problem.mask, gradients=wanted, **scales)
    return streaming_gradients(operands, problem.mask, gradients=wanted, **scales)


def _lengths(call: Call) -> dict[str, Tensor]:
    return {name: call.tensors[name] for name in LENGTHS if name in call.tensors}


def _scales(problem: AttnProblem) -> dict[str, float]:
    return {"softmax_scale": problem.softmax_scale, "softcap": problem.softcap}
