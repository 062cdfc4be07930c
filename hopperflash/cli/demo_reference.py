"""What a demonstration is held against: fp64, one key head at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from hopperflash.cli.inputs import Inputs
from hopperflash.errors import InvalidArgument
from hopperflash.problem import AttnProblem
from hopperflash.reference import (
    gradient_terms,
    low_precision_attention,
    low_precision_gradients,
    materialized_attention,
    materialized_gradients,
)
from hopperflash.tolerance import Deviation, tolerance

# Where the heads are in each result.
HEAD_AXIS = {"O": 2, "LSE": 1, "dQ": 2, "dK": 2, "dV": 2}


@dataclass(frozen=True)
class Cotangents:
    """Gradients of O and of the LSE that a backward starts from."""

    dout: Tensor  # (batch, seqlen_q, heads_q, head_dim_v)
    dlse: Tensor  # (batch, heads_q, seqlen_q) fp32

    @classmethod
    def random(cls, problem: AttnProblem, seed: int) -> Cotangents:
        """Standard normal values; the same seed draws the same."""
        p = problem
        generator = torch.Generator().manual_seed(seed + 1)
        rows = (p.batch, p.seqlen_q, p.heads_q)
        dout = torch.randn((*rows, p.head_dim_v), generator=generator)
        dlse = torch.randn((p.batch, p.heads_q, p.seqlen_q), generator=generator)
        return cls(dout.to(getattr(torch, p.dtype.value)), dlse)


@dataclass(frozen=True)
class Judged:
    """A result in fp64, in low precision, and the magnitude of its terms where they add up."""

    ref: Tensor
    low: Tensor
    terms: Tensor | None = None


def deviations(
    results: dict[str, Tensor],
    inputs: Inputs,
    cotangents: Cotangents | None,
    problem: AttnProblem,
) -> dict[str, Deviation]:
    """Deviation of O and LSE over all heads, and of the gradients where there are cotangents.

    Raises `InvalidArgument` for values that low precision cannot hold.
    """
    heads = list(product(range(problem.batch), range(problem.heads_k)))
    judged = [dict(_judge(inputs, cotangents, problem, b, h)) for b, h in heads]
    found = {}
    try:
        for name, result in results.items():
            parts, axis = [entry[name] for entry in judged], HEAD_AXIS[name]
            ref, low = (
                _assemble([getattr(part, kind) for part in parts], problem, axis)
                for kind in ("ref", "low")
            )
            magnitudes = [part.terms for part in parts if part.terms is not None]
            terms = _assemble(magnitudes, problem, axis) if magnitudes else None
            found[name] = tolerance(result, ref, low, terms=terms)
    except ValueError as unjudgeable:
        raise InvalidArgument(f"these values give no tolerance: {unjudgeable}") from None
    return found


def _judge(
    inputs: Inputs, cotangents: Cotangents | None, problem: AttnProblem, entry: int, head: int
) -> Iterator[tuple[str, Judged]]:
    """The results of one key head: a score matrix of its own at a time."""
    batch = slice(entry, entry + 1)
    group = slice(head * problem.group, (head + 1) * problem.group)
    q = inputs.q[batch, :, group]
    k, v = (operand[batch, :, head : head + 1] for operand in (inputs.k, inputs.v))
    scale, mask = problem.softmax_scale, problem.mask
    exact = materialized_attention(q, k, v, mask, softmax_scale=scale)
    low = low_precision_attention(q, k, v, mask, softmax_scale=scale)
    yield "O", Judged(exact[0], low[0])
    yield "LSE", Judged(exact[1], low[1], terms=exact[1])
    if cotangents is None:
        return
    incoming = cotangents.dout[batch, :, group], cotangents.dlse[batch, group]
    gradients = (
        function((q, k, v), *incoming, mask, softmax_scale=scale)
        for function in (materialized_gradients, low_precision_gradients, gradient_terms)
    )
    yield from zip(("dQ", "dK", "dV"), map(Judged, *gradients), strict=True)


def _assemble(parts: Sequence[Tensor], problem: AttnProblem, head_axis: int) -> Tensor:
    """Per-head results, key heads fastest, as one tensor."""
    entries = [parts[i : i + problem.heads_k] for i in range(0, len(parts), problem.heads_k)]
    return torch.cat([torch.cat(list(entry), dim=head_axis) for entry in entries])
