"""The attention that every kernel is compared with: the whole score matrix, nothing clever.

    S = softcap(softmax_scale * Q K^T),  P = softmax(S over visible keys),  O = P V,
    LSE = log(sum over visible keys of exp(S))

and its gradients by autograd. Memory is O(seqlen_q * seqlen_k); `hopperflash.streaming` computes
the same in O(seqlen).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from hopperflash.problem.mask import MaskSpec


class Gradients(NamedTuple):
    """Gradients of the operands, or something else by operand."""

    dq: Tensor  # (batch, seqlen_q, heads_q, head_dim)
    dk: Tensor  # (batch, seqlen_k, heads_k, head_dim)
    dv: Tensor  # (batch, seqlen_k, heads_k, head_dim_v)


def hidden_pairs(
    mask: MaskSpec,
    seqlen_q: int,
    seqlen_k: int,
    *,
    rows: range | None = None,
    columns: range | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """Bool (len(rows), len(columns)): true where key j is not visible to query i.

    Key j is visible iff i + (sk - sq) - left <= j <= i + (sk - sq) + right.
    """
    rows = range(seqlen_q) if rows is None else rows
    columns = range(seqlen_k) if columns is None else columns
    i = torch.arange(rows.start, rows.stop, device=device)[:, None]
    j = torch.arange(columns.start, columns.stop, device=device)[None, :]
    distance = j - i - (seqlen_k - seqlen_q)
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    farthest = seqlen_q + seqlen_k  # a bound may not fit int64
    if mask.left is not None:
        hidden |= distance < -min(mask.left, farthest)
    if mask.right is not None:
        hidden |= distance > min(mask.right, farthest)
    return hidden


def materialized_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: MaskSpec,
    *,
    softmax_scale: float,
    softcap: float = 0.0,
    compute_dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Attention in `compute_dtype`, differentiable by plain autograd.

    A row that sees no key has output 0, LSE -inf and zero gradients. Non-finite values at hidden
    keys are not contained (the formula multiplies them by zero): clear them before calling.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim).
        k: (batch, seqlen_k, heads_k, head_dim); query head h reads head h // (heads_q // heads_k).
        v: (batch, seqlen_k, heads_k, head_dim_v).

    Returns:
        out (batch, seqlen_q, heads_q, head_dim_v) and the natural-log LSE
        (batch, heads_q, seqlen_q), both in `compute_dtype`.
    """
    q, k, v = (x.to(compute_dtype) for x in (q, k, v))
    return _attention(q, k, v, mask, softmax_scale, softcap, rounded=lambda x: x)


def low_precision_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: MaskSpec,
    *,
    softmax_scale: float,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """The materialised formula with scores, probabilities and output rounded to the input dtype.

    Its error is the yardstick of `hopperflash.tolerance`. Products accumulate in fp32, so the
    result does not depend on which half-precision GEMM the CPU has; autograd rounds the
    gradients of the rounded tensors likewise.

    Returns:
        out in the input dtype and the LSE of the rounded scores in fp32.
    """
    dtype = q.dtype
    q, k, v = (x.float() for x in (q, k, v))
    out, lse = _attention(
        q, k, v, mask, softmax_scale, softcap, rounded=lambda x: x.to(dtype).float()
    )
    return out.to(dtype), lse


def materialized_gradients(
    operands: tuple[Tensor, Tensor, Tensor],
    dout: Tensor,
    dlse: Tensor | None,
    mask: MaskSpec,
    *,
    softmax_scale: float,
    softcap: float = 0.0,
) -> Gradients:
    """fp64 gradients of `materialized_attention`; `dlse` is None where nothing uses the LSE."""
    q, k, v = (x.detach().double().requires_grad_() for x in operands)
    with torch.enable_grad():
        results = materialized_attention(
            q, k, v, mask, softmax_scale=softmax_scale, softcap=softcap
        )
    return _gradients(results, (q, k, v), dout, dlse)


def low_precision_gradients(
    operands: tuple[Tensor, Tensor, Tensor],
    dout: Tensor,
    dlse: Tensor | None,
    mask: MaskSpec,
    *,
    softmax_scale: float,
    softcap: float = 0.0,
) -> Gradients:
    """Gradients of `low_precision_attention`, rounded wherever it rounds."""
    q, k, v = (x.detach().requires_grad_() for x in operands)
    with torch.enable_grad():
        results = low_precision_attention(
            q, k, v, mask, softmax_scale=softmax_scale, softcap=softcap
        )
    return _gradients(results, (q, k, v), dout, dlse)


def gradient_terms(
    operands: tuple[Tensor, Tensor, Tensor],
    dout: Tensor,
    dlse: Tensor | None,
    mask: MaskSpec,
    *,
    softmax_scale: float,
    softcap: float = 0.0,
) -> Gradients:
    """What the magnitudes of the terms of each gradient add up to, in fp64; see `tolerance`.

    The sums of a backward with every operand replaced by its absolute value, and every difference
    by a sum: dS = P (dP + delta), delta = rowsum(P dP) + dLSE; through a cap times 1 + tanh^2.
    """
    q, k, v = (x.detach().double() for x in operands)
    batch, seqlen_q, heads_q, _ = q.shape
    heads_k, group = k.shape[2], heads_q // k.shape[2]
    q = torch.unflatten(q, 2, (heads_k, group))
    dout = torch.unflatten(dout.double(), 2, (heads_k, group)).abs()
    hidden = hidden_pairs(mask, seqlen_q, k.shape[1], device=q.device)
    S = softmax_scale * torch.einsum("bqhgd,bkhd->bhgqk", q, k)
    slope = torch.ones_like(S)
    if softcap > 0:
        tanh = torch.tanh(S / softcap)
        S, slope = softcap * tanh, 1.0 + tanh.square()
    P = torch.softmax(S.masked_fill(hidden, -math.inf), dim=-1).masked_fill(hidden, 0.0)
    dP = torch.einsum("bqhgd,bkhd->bhgqk", dout, v.abs())
    delta = (P * dP).sum(-1, keepdim=True)
    if dlse is not None:
        delta = delta + dlse.double().abs().view(batch, heads_k, group, seqlen_q, 1)
    dS = softmax_scale * P * (dP + delta) * slope
    return Gradients(
        torch.einsum("bhgqk,bkhd->bqhgd", dS, k.abs()).flatten(2, 3),
        torch.einsum("bhgqk,bqhgd->bkhd", dS, q.abs()),
        torch.einsum("bhgqk,bqhgd->bkhd", P, dout),
    )


def _gradients(
    results: tuple[Tensor, Tensor],
    operands: tuple[Tensor, Tensor, Tensor],
    dout: Tensor,
    dlse: Tensor | None,
) -> Gradients:
    out, lse = results
    if dlse is None:
        return Gradients(*torch.autograd.grad(out, operands, dout.to(out.dtype)))
    incoming = (dout.to(out.dtype), dlse.to(lse.dtype))
    return Gradients(*torch.autograd.grad((out, lse), operands, incoming))


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: MaskSpec,
    softmax_scale: float,
    softcap: float,
    rounded: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    seqlen_q, seqlen_k, heads_k = q.shape[1], k.shape[1], k.shape[2]
    q = q.view(*q.shape[:2], heads_k, q.shape[2] // heads_k, q.shape[3])
    with torch.autocast(q.device.type, enabled=False):
        scores = rounded(torch.einsum("bqhgd,bkhd->bhgqk", q, k))
        scores = rounded(scores * softmax_scale)
        if softcap > 0:
            scores = rounded(softcap * rounded(torch.tanh(rounded(scores / softcap))))

        hidden = hidden_pairs(mask, seqlen_q, seqlen_k, device=q.device)
        # A row of -inf alone has NaN in its softmax and in that softmax's gradient: the masked_fill
        # after it clears the one, the backward of the masked_fill before it the other.
        scores = scores.masked_fill(hidden, -math.inf)
        lse = torch.logsumexp(scores, dim=-1)
        probabilities = rounded(torch.softmax(scores, dim=-1).masked_fill(hidden, 0.0))
        out = rounded(torch.einsum("bhgqk,bkhd->bqhgd", probabilities, v))
    return out.flatten(2, 3), lse.flatten(1, 2)
