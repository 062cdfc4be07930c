"""Operands as users have them: views, odd strides, neighbours full of NaN, nothing at all."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import hopperflash
from tests.support.cases import Case, Inputs, expected, make_inputs
from tests.support.tolerance import assert_close

pytestmark = [pytest.mark.emulated, pytest.mark.xdist_group("fp16-64")]

CASE = Case(
    "operands",
    dtype="fp16",
    seqlen_q=70,
    seqlen_k=90,
    heads_q=2,
    heads_k=2,
    head_dim=40,
    head_dim_v=40,
    causal=True,
)


def surrounded(x: Tensor) -> Tensor:
    """The same values as a slice of a larger tensor of NaN, aligned for TMA."""
    batch, seqlen, heads, head_dim = x.shape
    larger = x.new_full((batch, seqlen + 3, heads + 1, head_dim + 16), torch.nan)
    view = larger[:, 1:-2, :heads, 8:-8]
    return view.copy_(x)


def unaligned(x: Tensor) -> Tensor:
    """The same values one element past an aligned address."""
    memory = x.new_empty(x.numel() + 1)
    return memory[1:].view(x.shape).copy_(x)


VIEWS = {
    "heads first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "head_dim strided": lambda x: x.transpose(1, 3).contiguous().transpose(1, 3),
    "NaN neighbours": surrounded,
    "unaligned": unaligned,
    "every second row": lambda x: torch.repeat_interleave(x, 2, dim=1)[:, ::2],
    "one head expanded": lambda x: x[:, :, :1].expand(-1, -1, x.shape[2], -1),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_give_the_same_result_and_gradients(name: str) -> None:
    contiguous = make_inputs(CASE)
    if name == "one head expanded":
        contiguous = Inputs(*(x[:, :, :1].repeat(1, 1, 2, 1) for x in contiguous))
    views = [VIEWS[name](x).requires_grad_() for x in contiguous]
    before = [x.detach().clone() for x in views]
    leaves = [x.clone().requires_grad_() for x in contiguous]
    with hopperflash.emulate("sm_90a") as run:
        out, lse = hopperflash.flash_attn_func(*views, **CASE.options)
        same_out, same_lse = hopperflash.flash_attn_func(*leaves, **CASE.options)
        dout = torch.randn_like(out)
        gradients = torch.autograd.grad(out, views, VIEWS["heads first"](dout))
        same_gradients = torch.autograd.grad(same_out, leaves, dout)
    assert run.hazards == []
    assert torch.equal(out, same_out)
    assert torch.equal(lse, same_lse)
    for gradient, same in zip(gradients, same_gradients, strict=True):
        assert torch.equal(gradient, same)
    for view, values in zip(views, before, strict=True):
        assert torch.equal(view, values)
    want = expected(CASE, contiguous)
    assert_close(out, want.out, want.low_out)
    assert_close(lse, want.lse, want.low_lse)


def test_a_dimension_of_length_one_may_have_any_stride() -> None:
    q, k, v = make_inputs(Case("one", dtype="fp16", seqlen_q=1, seqlen_k=65))
    odd = [x.as_strided(x.shape, (7, x.stride(1), 3, 1)) for x in (q, k, v)]
    with hopperflash.emulate("sm_90a"):
        out = hopperflash.flash_attn_func(*odd)
        assert torch.equal(out, hopperflash.flash_attn_func(q, k, v))


@pytest.mark.parametrize(
    ("batch", "seqlen_q", "seqlen_k"), [(0, 4, 4), (2, 0, 4), (2, 4, 0)], ids=str
)
def test_empty_problems_need_no_launch(batch: int, seqlen_q: int, seqlen_k: int) -> None:
    shapes = ((batch, seqlen_q, 4, 64), (batch, seqlen_k, 2, 64), (batch, seqlen_k, 2, 64))
    q, k, v = (torch.randn(shape).half().requires_grad_() for shape in shapes)
    with hopperflash.emulate("sm_90a") as run:
        out, lse = hopperflash.flash_attn_func(q, k, v, causal=True, return_lse=True)
        out.sum().backward()
    assert run.launches == []
    assert out.shape == shapes[0]
    assert not out.any()
    assert (lse == -torch.inf).all()
    for x in (q, k, v):
        assert x.grad is not None
        assert not x.grad.any()
