"""Whether a result is right: two heads of it, all their rows, against fp64 by the package's rule.

The reference is materialised, a block of query rows at a time: with as many queries as keys, rows
[a, b) of a causal problem are the problem of those rows and of keys [0, b).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hopperflash.bench.cases import Shape
from hopperflash.problem.mask import MaskSpec
from hopperflash.reference import (
    gradient_terms,
    low_precision_attention,
    low_precision_gradients,
    materialized_attention,
    materialized_gradients,
)
from hopperflash.tolerance import Deviation, tolerance

# Elements of a block of the score matrix: 128 MiB of fp64, of which about ten are alive at once.
BLOCK = 1 << 24


@dataclass(frozen=True)
class Operands:
    """Of one shape; leaves that gradients are asked of."""

    q: Tensor  # (batch, seqlen, heads, head_dim)
    k: Tensor  # (batch, seqlen, kv_heads, head_dim)
    v: Tensor  # (batch, seqlen, kv_heads, head_dim)
    dout: Tensor  # (batch, seqlen, heads, head_dim)

    @classmethod
    def random(cls, shape: Shape, device: str, seed: int) -> Operands:
        """Standard normal values, drawn where they are used."""
        generator = torch.Generator(device).manual_seed(seed)
        dtype = getattr(torch, shape.dtype.value)

        def drawn(heads: int) -> Tensor:
            sizes = (shape.batch, shape.seqlen, heads, shape.head_dim)
            return torch.randn(sizes, generator=generator, device=device, dtype=dtype)

        heads, kv_heads = shape.heads, shape.kv_heads
        q, k, v = (drawn(count).requires_grad_() for count in (heads, kv_heads, kv_heads))
        return cls(q, k, v, drawn(heads))

    @property
    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v


@dataclass(frozen=True)
class Reference:
    """One result of one key head, exact and in low precision; and the magnitude of its terms."""

    ref: Tensor
    low: Tensor
    terms: Tensor | None = None


class Judge:
    """What a shape's results have to be, computed once for all implementations."""

    def __init__(self, shape: Shape, operands: Operands, *, gradients: bool) -> None:
        corners = {(0, 0): None, (shape.batch - 1, shape.kv_heads - 1): None}
        self._group = shape.heads // shape.kv_heads
        self._parts = {
            corner: _references(shape, self._sliced(operands, *corner), gradients)
            for corner in corners
        }

    def worst(self, results: dict[str, Tensor]) -> dict[str, Deviation]:
        """Of each result the deviation farthest from what is allowed, over the heads looked at."""
        found: dict[str, Deviation] = {}
        for (entry, head), references in self._parts.items():
            for name, result in results.items():
                heads = self._heads(head, query=name in ("O", "dQ"))
                one = references[name]
                part = result.detach()[entry : entry + 1, :, heads]
                deviation = tolerance(part, one.ref, one.low, terms=one.terms)
                if name not in found or _excess(deviation) > _excess(found[name]):
                    found[name] = deviation
        return found

    def _heads(self, head: int, *, query: bool) -> slice:
        heads = self._group if query else 1
        return slice(head * heads, (head + 1) * heads)

    def _sliced(self, operands: Operands, entry: int, head: int) -> Operands:
        def of(tensor: Tensor, *, query: bool) -> Tensor:
            return tensor.detach()[entry : entry + 1, :, self._heads(head, query=query)]

        q, dout = (of(x, query=True) for x in (operands.q, operands.dout))
        k, v = (of(x, query=False) for x in (operands.k, operands.v))
        return Operands(q, k, v, dout)


def _excess(deviation: Deviation) -> float:
    """Above 1 where it is not inside the tolerance."""
    if deviation.nonfinite_mismatches:
        return float("inf")
    pairs = (
        (deviation.max_error, deviation.max_bound),
        (deviation.rms_error, deviation.rms_bound),
    )
    return max(error / bound if bound else float(error > 0) * 2 for error, bound in pairs)


def _references(shape: Shape, operands: Operands, gradients: bool) -> dict[str, Reference]:
    """O of one key head, and dQ, dK and dV where asked for; gradients of keys add up by block."""
    mask = MaskSpec(right=0) if shape.causal else MaskSpec()
    scale = shape.head_dim**-0.5
    group = operands.q.shape[2]
    step = max(1, BLOCK // (shape.seqlen * group))
    outs, totals = [], [_Gradients(operands) for _ in range(3)]
    for start in range(0, shape.seqlen, step):
        rows = slice(start, min(start + step, shape.seqlen))
        keys = slice(0, rows.stop if shape.causal else shape.seqlen)
        q, dout = operands.q[:, rows], operands.dout[:, rows]
        k, v = operands.k[:, keys], operands.v[:, keys]
        exact, _ = materialized_attention(q, k, v, mask, softmax_scale=scale)
        low, _ = low_precision_attention(q, k, v, mask, softmax_scale=scale)
        outs.append((exact, low))
        if gradients:
            functions = (materialized_gradients, low_precision_gradients, gradient_terms)
            for total, function in zip(totals, functions, strict=True):
                total.add(rows, keys, function((q, k, v), dout, None, mask, softmax_scale=scale))
    ref, low = (torch.cat(parts, dim=1) for parts in zip(*outs, strict=True))
    found = {"O": Reference(ref, low)}
    if gradients:
        dtype = operands.q.dtype
        by_name = zip(("dQ", "dK", "dV"), *(total.whole for total in totals), strict=True)
        for name, exact, rounded, terms in by_name:
            found[name] = Reference(exact, rounded.to(dtype), terms)
    return found


class _Gradients:
    """Sums in fp64 of what blocks of rows contribute."""

    def __init__(self, operands: Operands) -> None:
        self.whole = tuple(torch.zeros_like(x, dtype=torch.float64) for x in operands.leaves)

    def add(self, rows: slice, keys: slice, part: tuple[Tensor, Tensor, Tensor]) -> None:
        for total, where, piece in zip(self.whole, (rows, keys, keys), part, strict=True):
            total[:, where] += piece
