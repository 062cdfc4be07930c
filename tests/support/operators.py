"""What runs through torch's dispatcher, and how often something is traced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode


@contextmanager
def calls_of(operator: OpOverload) -> Iterator[list[tuple[Any, ...]]]:
    """The arguments of every call of an operator below autograd, that of a backward too."""
    calls: list[tuple[Any, ...]] = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if func is operator:
                calls.append(args)
            return func(*args, **(kwargs or {}))

    with Recorder():
        yield calls


def compiled_with_counter(
    function: Callable[..., Any],
) -> tuple[Callable[..., Any], CompileCounterWithBackend]:
    """`torch.compile` of all of a function, and what counts its graphs."""
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(function, fullgraph=True, backend=counter), counter
