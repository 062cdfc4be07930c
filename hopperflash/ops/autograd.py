"""Who computes gradients: the backward operators, which have none themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._guards import detect_fake_mode

from hopperflash.calls import INPUTS
from hopperflash.errors import UnsupportedProblem
from hopperflash.ops.schema import NAMESPACE, OPERATORS, Operator, operator_of
from hopperflash.problem.lengths import LENGTHS
from hopperflash.runtime import emulation, preference


def register() -> None:
    """Gives every operator that makes new tensors its derivative."""
    for operator in OPERATORS:
        if operator.memory:
            continue
        name = f"{NAMESPACE}::{operator.name}"
        if operator.direction == "forward":
            torch.library.register_autograd(
                name, _backward(operator), setup_context=_setup_context(operator)
            )
        else:
            torch.library.register_autograd(name, _refuse_second_derivative)


def _setup_context(operator: Operator) -> Callable[..., None]:
    """Saves q, k, v, out and lse, nothing quadratic."""

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        tensors, _, options = operator.bind(inputs)
        lengths = [name for name in LENGTHS if name in tensors]
        ctx.names = (*INPUTS, "out", "lse", *lengths)
        ctx.save_for_backward(
            *(tensors[x] for x in INPUTS), *output, *(tensors[name] for name in lengths)
        )
        # The backward runs where the forward ran: its own thread knows neither of these. What is
        # traced runs elsewhere, later, and asks then.
        preferred = preference.preferred()
        if options.backend is None and preferred and detect_fake_mode(inputs) is None:
            options = options._replace(backend=preferred)
        ctx.options = options
        ctx.session = emulation.session_of(tensors["q"].device)
        ctx.count = len(inputs)
        ctx.set_materialize_grads(False)

    return setup_context


def _backward(operator: Operator) -> Callable[..., tuple[Tensor | None, ...]]:
    gradients_of = operator_of("backward", packed=operator.packed)

    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        nothing: tuple[Tensor | None, ...] = (None,) * ctx.count
        wanted = tuple(ctx.needs_input_grad[: len(INPUTS)])
        if not any(wanted) or (dout is None and dlse is None):
            return nothing
        tensors = dict(zip(ctx.names, ctx.saved_tensors, strict=True))
        dout = torch.zeros_like(tensors["out"]) if dout is None else dout
        with emulation.resumed(ctx.session):
            found = gradients_of({**tensors, "dout": dout, "dlse": dlse}, ctx.options, wanted)
        gradients = (x if is_wanted else None for x, is_wanted in zip(found, wanted, strict=True))
        return (*gradients, *nothing[len(INPUTS) :])

    return backward


def _refuse_second_derivative(ctx: Any, *_: Tensor | None) -> NoReturn:
    raise UnsupportedProblem(
        "no second derivatives: cannot differentiate twice through the kernels; the formula of"
        " hopperflash.reference.materialized_attention can be"
    )
