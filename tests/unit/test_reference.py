"""The materialised reference against a loop over single scores and against torch's own formula."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hopperflash.problem.mask import MaskSpec
from hopperflash.reference import hidden_pairs, low_precision_attention, materialized_attention

FULL, CAUSAL = MaskSpec(), MaskSpec(None, 0)
bounds = st.none() | st.integers(0, 12)


def tensors(
    seqlen_q: int, seqlen_k: int, *, heads: tuple[int, int] = (1, 1), batch: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seqlen_q * 1000 + seqlen_k)
    shapes = (
        (batch, seqlen_q, heads[0], 8),
        (batch, seqlen_k, heads[1], 8),
        (batch, seqlen_k, heads[1], 16),
    )
    q, k, v = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    return q, k, v


def scalar_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: MaskSpec, scale: float, softcap: float
) -> tuple[Tensor, Tensor]:
    """One output row at a time, from the definition."""
    (batch, seqlen_q, heads_q, _), (_, seqlen_k, heads_k, dim_v) = q.shape, v.shape
    out = torch.zeros(batch, seqlen_q, heads_q, dim_v, dtype=torch.float64)
    lse = torch.full((batch, heads_q, seqlen_q), -math.inf, dtype=torch.float64)
    for b, i, h in torch.cartesian_prod(*map(torch.arange, (batch, seqlen_q, heads_q))).tolist():
        head = h // (heads_q // heads_k)
        weights = {}
        for j in range(seqlen_k):
            if mask.visible(i, j, seqlen_q, seqlen_k):
                score = scale * float(q[b, i, h] @ k[b, j, head])
                score = softcap * math.tanh(score / softcap) if softcap else score
                weights[j] = math.exp(score)
        total = sum(weights.values())
        for j, weight in weights.items():
            out[b, i, h] += weight / total * v[b, j, head]
            lse[b, h, i] = math.log(total)
    return out, lse


@settings(max_examples=100, deadline=None)
@given(bounds, bounds, st.integers(0, 20), st.integers(0, 20))
def test_hidden_pairs_agree_with_the_mask(
    left: int | None, right: int | None, seqlen_q: int, seqlen_k: int
) -> None:
    mask = MaskSpec(left, right)
    hidden = hidden_pairs(mask, seqlen_q, seqlen_k)
    want = [
        [not mask.visible(i, j, seqlen_q, seqlen_k) for j in range(seqlen_k)]
        for i in range(seqlen_q)
    ]
    assert hidden.tolist() == want
    part = hidden_pairs(mask, seqlen_q, seqlen_k, rows=range(3, 7), columns=range(2, 9))
    if seqlen_q >= 7 and seqlen_k >= 9:
        assert torch.equal(part, hidden[3:7, 2:9])


def test_bounds_beyond_int64_hide_nothing() -> None:
    assert not hidden_pairs(MaskSpec(10**30, 10**30), 5, 9).any()


@pytest.mark.parametrize("mask", [FULL, CAUSAL, MaskSpec(2, 1)], ids=str)
@pytest.mark.parametrize("lengths", [(5, 7), (7, 5)])
@pytest.mark.parametrize("softcap", [0.0, 1.5])
def test_reference_is_the_definition(
    mask: MaskSpec, lengths: tuple[int, int], softcap: float
) -> None:
    q, k, v = tensors(*lengths, heads=(4, 2), batch=2)
    out, lse = materialized_attention(q, k, v, mask, softmax_scale=0.4, softcap=softcap)
    want_out, want_lse = scalar_attention(q, k, v, mask, 0.4, softcap)
    torch.testing.assert_close(out, want_out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, want_lse, rtol=1e-12, atol=1e-12)


def test_reference_agrees_with_sdpa() -> None:
    q, k, v = tensors(33, 33, heads=(4, 2))
    out, _ = materialized_attention(q, k, v, CAUSAL, softmax_scale=0.3)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    want = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(out, want.transpose(1, 2))


@pytest.mark.parametrize("lengths", [(6, 3), (4, 0)])
def test_rows_without_keys_are_zero_with_zero_gradients(lengths: tuple[int, int]) -> None:
    q, k, v = (x.requires_grad_() for x in tensors(*lengths))
    out, lse = materialized_attention(q, k, v, CAUSAL, softmax_scale=0.3)
    empty = lengths[0] - lengths[1]
    assert (out[:, :empty] == 0).all()
    assert (lse[:, :, :empty] == -math.inf).all()
    assert lse[:, :, empty:].isfinite().all()
    dq, dk, dv = torch.autograd.grad(
        (out, lse), (q, k, v), (torch.ones_like(out), torch.ones_like(lse))
    )
    assert (dq[:, :empty] == 0).all()
    assert all(x.isfinite().all() for x in (dq, dk, dv))


def test_reference_gradients_pass_gradcheck() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return materialized_attention(q, k, v, MaskSpec(3, 0), softmax_scale=0.3, softcap=2.0)

    leaves = [x.requires_grad_() for x in tensors(4, 5, heads=(2, 1))]
    assert torch.autograd.gradcheck(attention, leaves)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_reference_computes_half_precision_inputs_in_the_asked_dtype(dtype: torch.dtype) -> None:
    q, k, v = (x.to(dtype) for x in tensors(9, 9))
    out, lse = materialized_attention(q, k, v, FULL, softmax_scale=0.3)
    assert (out.dtype, lse.dtype) == (torch.float64, torch.float64)
    out32, lse32 = materialized_attention(
        q, k, v, FULL, softmax_scale=0.3, compute_dtype=torch.float32
    )
    assert (out32.dtype, lse32.dtype) == (torch.float32, torch.float32)
    torch.testing.assert_close(out32.double(), out, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_rounds_like_torch_in_that_dtype(dtype: torch.dtype) -> None:
    q, k, v = (x.to(dtype).requires_grad_() for x in tensors(40, 40))
    out, lse = low_precision_attention(q, k, v, FULL, softmax_scale=0.3)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    probabilities = (torch.einsum("bqhd,bkhd->bhqk", q, k) * 0.3).softmax(dim=-1)
    torch_out = torch.einsum("bhqk,bkhd->bqhd", probabilities, v)
    exact, _ = materialized_attention(q, k, v, FULL, softmax_scale=0.3)
    dq, torch_dq, exact_dq = (
        torch.autograd.grad(x.square().sum(), q)[0] for x in (out, torch_out, exact)
    )
    assert max_error(out, exact) == pytest.approx(max_error(torch_out, exact), rel=0.5)
    assert max_error(dq, exact_dq) == pytest.approx(max_error(torch_dq, exact_dq), rel=0.9)


def max_error(out: Tensor, exact: Tensor) -> float:
    return float((out.double() - exact).detach().abs().max())


def test_autocast_does_not_reach_the_reference() -> None:
    q, k, v = tensors(9, 9)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, _ = materialized_attention(
            q, k, v, FULL, softmax_scale=0.3, compute_dtype=torch.float32
        )
    want, _ = materialized_attention(q, k, v, FULL, softmax_scale=0.3)
    torch.testing.assert_close(out, want.float())
