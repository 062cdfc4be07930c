"""Results in given memory, and gradients without autograd: refusals, and the cpu backend."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import hopperflash
from hopperflash import InvalidArgument

OFFSETS = torch.tensor([0, 5, 5, 20], dtype=torch.int32)
PACKED = {"cu_seqlens_q": OFFSETS, "cu_seqlens_k": OFFSETS}


def operands(packed: bool = False) -> dict[str, Tensor]:
    """Of a backward: 20 queries, 20 keys."""
    q, k, v, dout = (torch.randn(1, 20, h, 64).bfloat16() for h in (4, 2, 2, 4))
    out, lse = hopperflash.flash_attn_func(q, k, v, causal=True, return_lse=True)
    if packed:
        q, k, v, dout = (x[0] for x in (q, k, v, dout))
        out, lse = hopperflash.flash_attn_varlen_func(
            q, k, v, OFFSETS, OFFSETS, 15, 15, causal=True, return_lse=True
        )
    return {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse}


def forward(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:
    if q.dim() == 3:
        return hopperflash.flash_attn_varlen_func(
            q, k, v, OFFSETS, OFFSETS, 15, 15, causal=True, out=out
        )
    return hopperflash.flash_attn_func(q, k, v, causal=True, out=out)


def backward(given: dict[str, Tensor], **more: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    lengths = PACKED if given["q"].dim() == 3 else {}
    return hopperflash.flash_attn_backward(**given, causal=True, **more, **lengths)


OUTPUTS = {
    "contiguous": lambda x: torch.empty_like(x, memory_format=torch.contiguous_format),
    "heads first": lambda x: torch.empty_like(x.transpose(-2, -3).contiguous()).transpose(-2, -3),
    "head_dim first": lambda x: torch.empty_like(x.mT.contiguous()).mT,
    "part": lambda x: torch.full((*x.shape[:-1], 192), torch.nan).bfloat16()[..., 64:128],
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("layout", OUTPUTS)
def test_output_goes_to_given_memory(layout, packed):
    given = operands(packed)
    out = OUTPUTS[layout](given["out"])
    got = forward(given["q"], given["k"], given["v"], out)
    assert got.data_ptr() == out.data_ptr() and got.shape == out.shape
    assert torch.equal(out, given["out"])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("layout", OUTPUTS)
def test_gradients_go_to_given_memory(layout, packed):
    given = operands(packed)
    memory = {f"d{name}": OUTPUTS[layout](given[name]) for name in "qkv"}
    found = backward(given, **memory)
    for gradient, buffer, fresh in zip(found, memory.values(), backward(given), strict=True):
        assert gradient.data_ptr() == buffer.data_ptr()
        assert torch.equal(buffer, fresh)


@pytest.mark.parametrize("packed", [False, True])
def test_gradients_are_those_of_autograd(packed):
    given = operands(packed)
    leaves = [given[name].clone().requires_grad_() for name in "qkv"]
    if packed:
        out, lse = hopperflash.flash_attn_varlen_func(
            *leaves, OFFSETS, OFFSETS, 15, 15, causal=True, return_lse=True
        )
    else:
        out, lse = hopperflash.flash_attn_func(*leaves, causal=True, return_lse=True)
    dlse = torch.randn_like(lse)
    expected = torch.autograd.grad((out, lse), leaves, (given["dout"], dlse))
    for found, wanted in zip(backward(given, dlse=dlse), expected, strict=True):
        assert torch.equal(found, wanted)


def test_keys_may_be_passed_in_parts():
    """With the results over all keys, the gradients of parts of the keys add up."""
    given = operands()
    whole = hopperflash.flash_attn_func(given["q"], given["k"], given["v"], return_lse=True)
    given["out"], given["lse"] = whole
    parts = [
        hopperflash.flash_attn_backward(
            **{**given, "k": given["k"][:, cut], "v": given["v"][:, cut]}
        )
        for cut in (slice(0, 7), slice(7, 20))
    ]
    dq, dk, dv = hopperflash.flash_attn_backward(**given)
    assert torch.allclose(parts[0][0].float() + parts[1][0].float(), dq.float(), atol=2e-2)
    assert torch.allclose(torch.cat([p[1] for p in parts], 1), dk, atol=1e-2)
    assert torch.allclose(torch.cat([p[2] for p in parts], 1), dv, atol=1e-2)


def test_a_row_whose_lse_is_minus_infinity_has_no_gradient():
    given = operands()
    given["lse"][:, :, 3] = -torch.inf
    dq, dk, dv = backward(given)
    assert not dq[:, 3].any()
    assert all(x.isfinite().all() for x in (dq, dk, dv))


REFUSED = {
    "shape": (lambda x: x[:, :-1].clone(), "out has shape (1, 19, 4, 64): give (1, 20, 4, 64)"),
    "dtype": (lambda x: x.half(), "out has dtype float16: give bfloat16"),
    "device": (lambda x: x.to("meta"), "out is on meta: give tensors on cpu or cuda"),
    "no tensor": (lambda x: [x], "out is a list: give a torch.Tensor"),
    "expanded": (
        lambda x: x[:, :1].expand(x.shape),
        "its elements share memory, give each its own",
    ),
    "overlapping": (
        lambda x: x.new_empty(10000).as_strided(x.shape, (9999, 63, 64, 1)),
        "its elements share memory, give each its own",
    ),
    "negated": (lambda x: torch._neg_view(x.clone()), "out is a lazily negated view"),
    "differentiable": (lambda x: x.clone().requires_grad_(), "out is given, but out may need"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_memory_that_cannot_take_the_output_is_refused(name):
    make, reason = REFUSED[name]
    given = operands()
    with pytest.raises(InvalidArgument) as refused:
        forward(given["q"], given["k"], given["v"], make(given["out"]))
    assert reason in str(refused.value)


def test_output_memory_excludes_gradients():
    given = operands()
    q, k, v, out = (given[name] for name in ("q", "k", "v", "out"))
    q.requires_grad_()
    with pytest.raises(InvalidArgument, match=r"q may need gradients: call inside torch\.no_grad"):
        forward(q, k, v, out)
    with torch.no_grad():
        assert forward(q, k, v, out) is not None


def test_memory_of_an_operand_is_refused():
    given = operands()
    q, k, v = (given[name] for name in "qkv")
    with pytest.raises(InvalidArgument, match="out shares memory with q: give memory of its own"):
        forward(q, k, v, q)
    fused = torch.empty(2, *k.shape).bfloat16()
    with pytest.raises(InvalidArgument) as refused:
        backward(
            {**given, "k": fused[0]},
            dk=fused[0],
            dv=fused.flatten()[64:][: k.numel()].view(k.shape),
        )
    assert "dk shares memory with k" in str(refused.value)
    assert "dv shares memory with dk" in str(refused.value)
    assert backward(given, dk=fused[0], dv=fused[1])


def test_a_backward_lists_all_that_does_not_fit():
    given = operands()
    given |= {
        "dout": given["dout"][:, :3],
        "out": given["out"].half(),
        "lse": given["lse"].double(),
    }
    with pytest.raises(InvalidArgument) as refused:
        backward(given, dlse=torch.zeros(1, 4, 19), dq=given["q"][:, :, :1].expand(1, 20, 4, 64))
    for reason in (
        "dout has shape (1, 3, 4, 64): give (1, 20, 4, 64)",
        "out has dtype float16: give bfloat16",
        "lse has dtype float64: give float32",
        "dlse has shape (1, 4, 19): give (1, 4, 20)",
        "dq has strides (5120, 256, 0, 1) for shape (1, 20, 4, 64): its elements share memory",
        "dq shares memory with q",
    ):
        assert reason in refused.value.reasons or reason in str(refused.value), reason
    packed = operands(packed=True)
    with pytest.raises(InvalidArgument, match=r"lse has shape \(4, 19\): give \(4, 20\)"):
        backward({**packed, "lse": packed["lse"][:, 1:]})


def test_what_belongs_to_a_backward_is_no_operand_of_a_forward():
    given = operands()
    answer = hopperflash.supports(given["q"], given["k"], given["v"], dout=given["dout"])
    assert answer.reasons == ("dout belongs to a backward",)
