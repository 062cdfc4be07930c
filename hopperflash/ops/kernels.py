"""The operators on CPU and CUDA tensors: checks, plans and runs a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hopperflash.calls import accept
from hopperflash.ops.compute import compute
from hopperflash.ops.schema import LIBRARY, OPERATORS, Operator

_DEVICES = ("CPU", "CUDA")


def register() -> None:
    """Implements every operator."""
    for operator in OPERATORS:
        kernel = _kernel(operator)
        for device in _DEVICES:
            LIBRARY.impl(operator.name, kernel, device)  # type: ignore[no-untyped-call]


def _kernel(operator: Operator) -> Callable[..., Any]:
    def run(*arguments: Any) -> Any:
        tensors, gradients, options = operator.bind(arguments)
        call = accept(
            tensors,
            options.for_problem,
            direction=operator.direction,
            gradients=gradients,
            backend=options.backend,
        )
        results = compute(call)
        q = tensors["q"]
        returned = [
            results[name] if name in results else q.new_empty(0) for name in operator.returns
        ]
        if len(returned) == 1:
            return returned[0]
        return tuple(returned) if returned else None

    return run
