"""The streaming CPU backend against the materialised fp64 reference, forward and backward."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import hopperflash.streaming
from hopperflash.problem.mask import MaskSpec
from hopperflash.reference import low_precision_attention, materialized_attention
from tests.support.cases import FORWARD_CASES, Case, check_forward, make_inputs
from tests.support.streaming import streaming_attention
from tests.support.tolerance import assert_close

FULL, CAUSAL = MaskSpec(), MaskSpec(None, 0)
SCALE = 0.3
DTYPES = [torch.bfloat16, torch.float16]
Operands = tuple[Tensor, Tensor, Tensor]


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 32 queries x 24 keys: short sequences cross many tile edges."""
    monkeypatch.setattr(hopperflash.streaming, "_TILE_K", 24)
    monkeypatch.setattr(hopperflash.streaming, "_SCORE_TILE_ELEMENTS", 24 * 32)


def make(
    seqlen_q: int,
    seqlen_k: int,
    *,
    batch: int = 1,
    heads: tuple[int, int] = (1, 1),
    dims: tuple[int, int] = (8, 16),
    dtype: torch.dtype = torch.float64,
) -> Operands:
    generator = torch.Generator().manual_seed(seqlen_q * 1000 + seqlen_k)
    shapes = (
        (batch, seqlen_q, heads[0], dims[0]),
        (batch, seqlen_k, heads[1], dims[0]),
        (batch, seqlen_k, heads[1], dims[1]),
    )
    q, k, v = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def make_leaves(seqlen_q: int, seqlen_k: int, **options: Any) -> Operands:
    q, k, v = make(seqlen_q, seqlen_k, **options)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


def with_gradients(
    attention: Callable[..., tuple[Tensor, Tensor]],
    operands: Operands,
    mask: MaskSpec,
    softcap: float = 0.0,
) -> dict[str, Tensor]:
    """Results and gradients for fixed, random dO and dLSE that any dtype holds exactly."""
    leaves = [x.detach().requires_grad_() for x in operands]
    out, lse = attention(*leaves, mask, softmax_scale=SCALE, softcap=softcap)
    generator = torch.Generator().manual_seed(0)
    cotangents = [
        (torch.randint(-32, 33, x.shape, generator=generator) / 16).to(x.dtype) for x in (out, lse)
    ]
    dq, dk, dv = torch.autograd.grad((out, lse), leaves, cotangents)
    return {"out": out.detach(), "lse": lse.detach(), "dq": dq, "dk": dk, "dv": dv}


def flash_attn_like(q: Tensor, k: Tensor, v: Tensor, /, **options: Any) -> tuple[Tensor, Tensor]:
    mask = MaskSpec.canonical(options["causal"], options["window_size"])
    return streaming_attention(
        q, k, v, mask, softmax_scale=options["softmax_scale"], softcap=options["softcap"]
    )


@pytest.mark.parametrize("case", FORWARD_CASES, ids=str)
def test_named_case(case: Case) -> None:
    check_forward(case, flash_attn_like)


bounds = st.none() | st.integers(0, 60)


@pytest.mark.usefixtures("small_tiles")
@settings(max_examples=60, deadline=None)
@given(
    seqlen_q=st.integers(0, 100),
    seqlen_k=st.integers(0, 100),
    batch=st.integers(0, 2),
    heads=st.sampled_from([(1, 1), (2, 1), (3, 3), (6, 2)]),
    dims=st.sampled_from([(8, 8), (8, 24), (16, 8)]),
    mask=st.builds(MaskSpec, bounds, bounds),
    softcap=st.sampled_from([0.0, 1.5]),
)
def test_results_and_gradients_equal_the_reference(
    seqlen_q: int,
    seqlen_k: int,
    batch: int,
    heads: tuple[int, int],
    dims: tuple[int, int],
    mask: MaskSpec,
    softcap: float,
) -> None:
    operands = make(seqlen_q, seqlen_k, batch=batch, heads=heads, dims=dims)
    got = with_gradients(streaming_attention, operands, mask, softcap)
    want = with_gradients(materialized_attention, operands, mask, softcap)
    for name, value in got.items():
        torch.testing.assert_close(value, want[name], rtol=1e-11, atol=1e-11)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("mask", [FULL, CAUSAL, MaskSpec(20, 5)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_half_precision_gradients_are_close(
    dtype: torch.dtype, mask: MaskSpec, softcap: float
) -> None:
    operands = make(90, 70, batch=2, heads=(4, 2), dims=(64, 40), dtype=dtype)
    got = with_gradients(streaming_attention, operands, mask, softcap)
    q, k, v = (x.double() for x in operands)
    ref = with_gradients(materialized_attention, (q, k, v), mask, softcap)
    low = with_gradients(low_precision_attention, operands, mask, softcap)
    assert [got[name].dtype for name in ("out", "dq", "dk", "dv")] == [dtype] * 4
    assert got["lse"].dtype == torch.float32
    for name, value in got.items():
        assert_close(value, ref[name], low[name], factor=3.0 if softcap else 2.0, name=name)


def test_gradcheck() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return streaming_attention(q, k, v, MaskSpec(3, 0), softmax_scale=SCALE, softcap=2.0)

    assert torch.autograd.gradcheck(attention, make_leaves(4, 5, heads=(2, 1)))


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(70, 30), (40, 0), (0, 40), (0, 0)])
@pytest.mark.parametrize("batch", [0, 1])
def test_rows_without_keys(seqlen_q: int, seqlen_k: int, batch: int) -> None:
    operands = make(seqlen_q, seqlen_k, batch=batch, heads=(2, 1), dtype=torch.bfloat16)
    got = with_gradients(streaming_attention, operands, CAUSAL)
    empty = max(0, seqlen_q - seqlen_k)
    assert (got["out"][:, :empty] == 0).all()
    assert (got["lse"][:, :, :empty] == -math.inf).all()
    assert (got["dq"][:, :empty] == 0).all()
    assert got["lse"][:, :, empty:].isfinite().all()
    assert all(got[name].isfinite().all() for name in ("out", "dq", "dk", "dv"))
    assert [got[name].shape for name in ("dq", "dk", "dv")] == [x.shape for x in operands]
    if seqlen_q == 0:
        assert all((got[name] == 0).all() for name in ("dk", "dv"))


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_keys_that_no_query_sees_never_matter(poison: float) -> None:
    mask, seqlen_q, seqlen_k = MaskSpec(10, 0), 50, 90  # the first query sees keys 30 .. 40
    q, k, v = make(seqlen_q, seqlen_k, heads=(2, 1))
    clean = with_gradients(streaming_attention, (q, k, v), mask)
    k[:, :30], v[:, :30] = poison, poison
    poisoned = with_gradients(streaming_attention, (q, k, v), mask)
    assert all(torch.equal(clean[name], poisoned[name]) for name in clean)
    assert (poisoned["dk"][:, :30] == 0).all()


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("poisoned_operand", ["q", "k", "v"])
def test_nan_stays_within_the_pairs_that_see_it(poisoned_operand: str) -> None:
    """Causal, so NaN at position 40 may reach queries from 40 on and, through them, keys."""
    q, k, v = make(80, 80, heads=(2, 1))
    clean = with_gradients(streaming_attention, (q, k, v), CAUSAL)
    {"q": q, "k": k, "v": v}[poisoned_operand][:, 40] = math.nan
    got = with_gradients(streaming_attention, (q, k, v), CAUSAL)
    assert torch.equal(got["out"][:, :40], clean["out"][:, :40])
    assert torch.equal(got["lse"][:, :, :40], clean["lse"][:, :, :40])
    assert torch.equal(got["dq"][:, :40], clean["dq"][:, :40])
    reached = slice(40, 41) if poisoned_operand == "q" else slice(40, None)
    assert got["out"][:, reached].isnan().all()
    if poisoned_operand == "q":
        for name in ("dk", "dv"):
            assert torch.equal(got[name][:, 41:], clean[name][:, 41:])


@pytest.mark.usefixtures("small_tiles")
def test_nan_in_the_gradient_of_an_empty_row_reaches_nothing() -> None:
    q, k, v = make_leaves(60, 40)
    out, lse = streaming_attention(q, k, v, CAUSAL, softmax_scale=SCALE)
    dout, dlse = torch.ones_like(out), torch.ones_like(lse)
    dout[:, :20], dlse[:, :, :20] = math.nan, math.nan
    dq, dk, dv = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse))
    assert (dq[:, :20] == 0).all()
    assert all(x.isfinite().all() for x in (dq, dk, dv))


def test_any_strides_give_the_same_results() -> None:
    q, k, v = make(40, 50, batch=2, heads=(4, 4), dims=(8, 8))
    q = q.transpose(1, 2).contiguous().transpose(1, 2)
    k = torch.stack([k, k], dim=-1)[..., 0]
    v = v[:, :, :1].expand(-1, -1, 4, -1)
    got = with_gradients(streaming_attention, (q, k, v), CAUSAL)
    dense = q.contiguous(), k.contiguous(), v.contiguous()
    want = with_gradients(streaming_attention, dense, CAUSAL)
    assert all(torch.equal(got[name], want[name]) for name in got)


def test_expanded_output_gradient() -> None:
    q, k, v = make_leaves(40, 50)
    out, _ = streaming_attention(q, k, v, CAUSAL, softmax_scale=SCALE)
    reference, _ = materialized_attention(q, k, v, CAUSAL, softmax_scale=SCALE)
    for x in (q, k, v):
        got, want = (torch.autograd.grad(y.sum(), x, retain_graph=True) for y in (out, reference))
        torch.testing.assert_close(got, want)


def test_lazily_negated_output_gradient() -> None:
    q, k, v = (x.requires_grad_() for x in make_inputs(Case("negated", dtype="fp16")))
    out, _ = streaming_attention(q, k, v, MaskSpec(), softmax_scale=0.1)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    want = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
    got = torch.autograd.grad(out, (q, k, v), torch._neg_view(-dout))
    assert all(map(torch.equal, got, want))


def test_only_the_needed_gradients_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    products = []
    visible_product = hopperflash.streaming._visible_product

    def counted(*operands: Any) -> Tensor:
        products.append(operands)
        return visible_product(*operands)

    q, k, v = make(10, 10)
    for needed in ((q,), (k,), (v,), (q, v)):
        for x in (q, k, v):
            x.requires_grad_(any(x is y for y in needed))
        out, _ = streaming_attention(q, k, v, FULL, softmax_scale=SCALE)
        with monkeypatch.context() as patch:
            patch.setattr(hopperflash.streaming, "_visible_product", counted)
            products.clear()
            torch.autograd.backward(out.sum())
        assert len(products) == len(needed)
        for x in (q, k, v):
            assert (x.grad is not None) == x.requires_grad
            x.grad = None


def test_lse_alone_has_a_gradient() -> None:
    q, k, v = make_leaves(20, 30)
    _, lse = streaming_attention(q, k, v, CAUSAL, softmax_scale=SCALE)
    _, reference = materialized_attention(q, k, v, CAUSAL, softmax_scale=SCALE)
    got, want = (torch.autograd.grad(x.sum(), (q, k)) for x in (lse, reference))
    torch.testing.assert_close(got, want)


def test_autocast_does_not_change_the_arithmetic() -> None:
    q, k, v = make(30, 30, dtype=torch.float32)
    want = with_gradients(streaming_attention, (q, k, v), CAUSAL)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = with_gradients(streaming_attention, (q, k, v), CAUSAL)
    assert all(torch.equal(got[name], want[name]) for name in got)


def test_large_scores_do_not_overflow() -> None:
    case = Case("large", seqlen_q=65, seqlen_k=65, magnitude=20.0, causal=True)  # scores to 1500
    out, lse = flash_attn_like(*make_inputs(case), **case.options)
    assert out.isfinite().all()
    assert lse.isfinite().all()


def largest_allocation(seqlen: int, *, backward: bool) -> int:
    """Bytes of the largest block that one call allocates."""
    q, k, v = make_leaves(seqlen, seqlen, dtype=torch.bfloat16)
    out, _ = streaming_attention(q, k, v, CAUSAL, softmax_scale=SCALE)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        if backward:
            torch.autograd.backward(out.sum())
        else:
            streaming_attention(q, k, v, CAUSAL, softmax_scale=SCALE)
    return max(int(event.self_cpu_memory_usage) for event in profile.events() or ())


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("backward", [False, True])
def test_memory_grows_linearly(backward: bool) -> None:
    short, long = (largest_allocation(n, backward=backward) for n in (256, 512))
    assert long <= 2 * short
    assert long < 512 * 512  # a quarter of the fp32 scores
