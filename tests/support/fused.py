"""The functions that take q, k and v in one tensor, beside the plain ones they must equal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import hopperflash

OFFSETS = torch.tensor([0, 7, 7, 20], dtype=torch.int32)
OPTIONS: dict[str, Any] = {"causal": True, "return_lse": True}


class Fused(NamedTuple):
    """`call` of leaves; `plain` of the leaves and the same options."""

    shapes: tuple[tuple[int, ...], ...]
    call: Callable[..., Any]
    plain: Callable[..., Any]


def _varlen(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    return hopperflash.flash_attn_varlen_func(q, k, v, OFFSETS, OFFSETS, 13, 13, **options)


FUSED = {
    "qkv": Fused(
        ((2, 9, 3, 2, 64),),
        lambda qkv, **options: hopperflash.flash_attn_qkvpacked_func(qkv, **options),
        lambda qkv, **options: hopperflash.flash_attn_func(*qkv.unbind(2), **options),
    ),
    "kv": Fused(
        ((2, 9, 4, 64), (2, 11, 2, 2, 64)),
        lambda q, kv, **options: hopperflash.flash_attn_kvpacked_func(q, kv, **options),
        lambda q, kv, **options: hopperflash.flash_attn_func(
            q, kv[:, :, 0], kv[:, :, 1], **options
        ),
    ),
    "varlen qkv": Fused(
        ((20, 3, 2, 64),),
        lambda qkv, **options: hopperflash.flash_attn_varlen_qkvpacked_func(
            qkv, OFFSETS, 13, **options
        ),
        lambda qkv, **options: _varlen(*qkv.unbind(1), **options),
    ),
    "varlen kv": Fused(
        ((20, 4, 64), (20, 2, 2, 64)),
        lambda q, kv, **options: hopperflash.flash_attn_varlen_kvpacked_func(
            q, kv, OFFSETS, OFFSETS, 13, 13, **options
        ),
        lambda q, kv, **options: _varlen(q, kv[:, 0], kv[:, 1], **options),
    ),
}


def assert_equals_plain(name: str) -> None:
    """Output, LSE and the gradients of every leaf, bit for bit."""
    case = FUSED[name]
    leaves = [torch.randn(shape).half().requires_grad_() for shape in case.shapes]
    copies = [x.detach().clone().requires_grad_() for x in leaves]
    out, lse = case.call(*leaves, **OPTIONS)
    same_out, same_lse = case.plain(*copies, **OPTIONS)
    assert torch.equal(out, same_out)
    assert torch.equal(lse, same_lse)
    dout = torch.randn_like(out)
    gradients = torch.autograd.grad(out, leaves, dout)
    for leaf, gradient, same in zip(
        leaves, gradients, torch.autograd.grad(same_out, copies, dout), strict=True
    ):
        assert gradient.shape == leaf.shape
        assert torch.equal(gradient, same)
