"""The arguments of a public function to an operator, or to the refusal of what none could take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from hopperflash.calls import INPUTS, MAX_SEQLENS, accept
from hopperflash.errors import UnsupportedProblem
from hopperflash.ops.schema import UNBOUNDED, Options, operator_of
from hopperflash.ops.sharding import register_if_distributed
from hopperflash.problem import GRADIENTS, AttnOptions, Direction
from hopperflash.problem.lengths import LENGTHS


def attention(
    given: Mapping[str, Any], options: AttnOptions, backend: str | None
) -> tuple[Tensor, Tensor]:
    """(out, lse) of arguments by name: q, k, v, lengths of packed sequences, memory for "out"."""
    _refuse_tangents(given)
    scalars = _options(given, options, backend, "forward")
    packed = "cu_seqlens_q" in given
    if "out" in given:
        lse = operator_of("forward", packed=packed, into=True)(given, scalars)
        return given["out"], lse
    out, lse = operator_of("forward", packed=packed)(given, scalars)
    return out, lse


def gradients(
    given: Mapping[str, Any], options: AttnOptions, backend: str | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of arguments by name, written to memory of those names where it is given."""
    _refuse_tangents(given)
    scalars = _options(given, options, backend, "backward")
    packed = "cu_seqlens_q" in given
    if any(name in given for name in GRADIENTS):
        memory = {
            name: given[name]
            if name in given
            else torch.empty_like(given[source], memory_format=torch.contiguous_format)
            for name, source in zip(GRADIENTS, INPUTS, strict=True)
        }
        operator_of("backward", packed=packed, into=True)({**given, **memory}, scalars)
        return memory["dq"], memory["dk"], memory["dv"]
    dq, dk, dv = operator_of("backward", packed=packed)(given, scalars)
    return dq, dk, dv


def _options(
    given: Mapping[str, Any], options: AttnOptions, backend: str | None, direction: Direction
) -> Options:
    """Options as operators take them.

    Schemas have no place for what no backend computes, and say little about what they do not take:
    what does not fit them is refused here, with every reason.
    """
    options = options if options.is_plain else options.in_own_types
    if _fits(given, options, backend, direction):
        register_if_distributed(given["q"])
        left, right = options.window_size
        return Options(
            softmax_scale=options.softmax_scale,
            causal=options.causal,
            window_left=UNBOUNDED if left is None else left,
            window_right=UNBOUNDED if right is None else right,
            softcap=options.softcap,
            deterministic=options.deterministic,
            backend=backend,
            sm_margin=options.sm_margin,
        )
    if torch.compiler.is_compiling():  # which cannot follow what refuses
        torch._dynamo.graph_break(
            msg="hopperflash refuses this: without fullgraph=True it says why"
        )
    call = accept(given, options, direction=direction, backend=backend)
    return Options.of(call.plan.problem, backend)


def _refuse_tangents(given: Mapping[str, Any]) -> None:
    """torch takes the results of an operator without a forward-mode rule for constants."""
    if forward_ad._current_level < 0:
        return
    tensors = [x for x in given.values() if isinstance(x, Tensor)]
    tangents = [forward_ad.unpack_dual(x).tangent for x in tensors]  # type: ignore[no-untyped-call]
    if any(tangent is not None for tangent in tangents):
        raise UnsupportedProblem(
            "no forward-mode derivatives (torch.func.jvp, dual tensors): backward() has gradients;"
            " the formula of hopperflash.reference.materialized_attention has both"
        )


def _fits(
    given: Mapping[str, Any], options: AttnOptions, backend: str | None, direction: Direction
) -> bool:
    """Whether a schema has a place for everything; values are checked by the operator.

    `accept` has the words for what does not fit. This can be traced, which those cannot.
    """
    memory = ("out",) if direction == "forward" else GRADIENTS
    tensors = {name: x for name, x in given.items() if name not in MAX_SEQLENS}
    return (
        options.is_plain
        and _are_int64(*options.window_size, options.sm_margin)
        and not (options.dropout_p or options.alibi or options.return_attn_probs)
        and (backend is None or isinstance(backend, str))
        and ("cu_seqlens_q" in given) == ("cu_seqlens_k" in given)
        and ("cu_seqlens_q" in given or not any(name in given for name in LENGTHS))
        and all(_is_max_seqlen(given[name]) for name in MAX_SEQLENS if name in given)
        and all(map(_is_dense, tensors.values()))
        and len({x.device for x in tensors.values()}) == 1
        and not any(_is_negated(given[name]) for name in memory if name in given)
    )


def _are_int64(*numbers: int | None) -> bool:
    """Symbols of traced code are, and are not to be compared with anything."""
    return torch.compiler.is_compiling() or all(x is None or x < 2**63 for x in numbers)


def _is_dense(value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and not value.is_nested
        and value.layout is torch.strided
        and value.device.type in ("cpu", "cuda", "meta")
    )


def _is_negated(memory: Tensor) -> bool:
    """Whether values written to it would be read with the other sign; tracing cannot ask that."""
    return not torch.compiler.is_compiling() and memory.is_neg()


def _is_max_seqlen(value: Any) -> bool:
    """Nothing looks at it, so that anything else is refused."""
    if isinstance(value, Tensor):
        return value.dim() == 0 and value.dtype in (torch.int32, torch.int64)
    return isinstance(value, int) and value >= 0
