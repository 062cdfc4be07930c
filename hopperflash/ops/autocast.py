"""Inside `torch.autocast`, fp32 operands of a forward are cast to its dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hopperflash.calls import INPUTS
from hopperflash.ops.schema import LIBRARY, OPERATORS, Operator
from hopperflash.runtime import tensors

_KEYS = ("AutocastCPU", "AutocastCUDA")


def register() -> None:
    """Gives every forward operator its rule."""
    for operator in OPERATORS:
        for key in _KEYS if operator.direction == "forward" else ():
            LIBRARY.impl(operator.name, _cast(operator, key), key)  # type: ignore[no-untyped-call]


def _cast(operator: Operator, key: str) -> Callable[..., Any]:
    below = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
    is_input = tuple(name in INPUTS for name in operator.operands)

    def cast(*arguments: Any) -> Any:
        operands = [
            tensors.concrete(x) if is_cast else x
            for x, is_cast in zip(arguments, is_input, strict=False)
        ]
        with torch._C._ExcludeDispatchKeyGuard(below):
            return operator.overload(*operands, *arguments[len(operands) :])

    return cast
