"""Shapes, strides and dtypes of the operators' results, for tracing and for meta tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hopperflash.errors import InvalidArgument
from hopperflash.ops.schema import NAMESPACE, OPERATORS, Operator
from hopperflash.problem import HEADLINE, OperandFacts, build_problem
from hopperflash.problem.lengths import LENGTHS
from hopperflash.runtime.tensors import gradient_reasons


def register() -> None:
    """Gives every operator its fake kernel."""
    for operator in OPERATORS:
        torch.library.register_fake(f"{NAMESPACE}::{operator.name}", _fake(operator))


def _fake(operator: Operator) -> Callable[..., Any]:
    def trace(*arguments: Any) -> Any:
        tensors, gradients, _ = operator.bind(arguments)
        _check(tensors, operator.memory)
        shapes = _shapes(tensors["q"], tensors["k"], tensors["v"])
        q = tensors["q"]
        returned = []
        for name in operator.returns:
            shape = shapes[name] if name in ("out", "lse", *gradients) else (0,)
            dtype = torch.float32 if name == "lse" else q.dtype
            returned.append(q.new_empty(shape, dtype=dtype))
        if len(returned) == 1:
            return returned[0]
        return tuple(returned) if returned else None

    return trace


def _shapes(q: Tensor, k: Tensor, v: Tensor) -> dict[str, tuple[int, ...]]:
    """Of all results, which are contiguous; packed ones have no batch."""
    *batch, seqlen_q, heads_q, _ = q.shape
    return {
        "out": (*batch, seqlen_q, heads_q, v.shape[-1]),
        "lse": (*batch, heads_q, seqlen_q),
        "dq": tuple(q.shape),
        "dk": tuple(k.shape),
        "dv": tuple(v.shape),
    }


def _check(tensors: Mapping[str, Tensor], memory: Sequence[str]) -> None:
    """Refuses operands while they are traced that would be refused when they are computed with.

    Values of options are left to that: to look at them would fix them in the traced code.
    """
    facts = {
        name: OperandFacts(
            shape=tuple(x.shape),
            strides=tuple(x.stride()),
            alignment=1,
            # Lengths are cast before they are looked at.
            dtype=str(torch.int32 if x.dtype == torch.int64 else x.dtype).removeprefix("torch."),
            device=str(x.device),
        )
        for name, x in tensors.items()
    }
    lengths = {name: facts[name] for name in LENGTHS if name in facts}
    build_problem(facts["q"], facts["k"], facts["v"], None, lengths or None)
    results = {name: tensors[name] for name in memory}
    operands = {name: x for name, x in tensors.items() if name not in memory}
    reasons = list(gradient_reasons(results, operands))
    if reasons:
        raise InvalidArgument(HEADLINE, reasons)
