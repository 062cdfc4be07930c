"""PyTorch's attention, called as `hopperflash.flash_attn_func` is, to compare the two."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl

import hopperflash.integrations.torch  # noqa: F401 - registers the name

# Sequences of 30, 0 and 20 of the rows of `packed`.
CU_SEQLENS = torch.tensor([0, 30, 30, 50], dtype=torch.int32)


@contextmanager
def activated(name: str = "hopperflash") -> Iterator[None]:
    """What is registered under that name, under PyTorch's flash attention operators."""
    activate_flash_attention_impl(name)
    try:
        yield
    finally:
        restore_flash_attention_impl()


def sdpa(q: Tensor, k: Tensor, v: Tensor, /, **options: Any) -> tuple[Tensor, None]:
    """`scaled_dot_product_attention` of (batch, seqlen, heads, head_dim); it gives no LSE."""
    out = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)),
        is_causal=options["causal"],
        scale=options["softmax_scale"],
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out.transpose(1, 2), None


def flash_operator(q: Tensor, k: Tensor, v: Tensor, /, **options: Any) -> tuple[Tensor, Tensor]:
    """The operator that SDPA calls on a GPU, for (batch, seqlen, heads, head_dim)."""
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        *(x.transpose(1, 2) for x in (q, k, v)),
        is_causal=options["causal"],
        scale=options["softmax_scale"],
    )
    return out.transpose(1, 2), lse


def heads_first(seqlen: int = 40, heads: int = 4, head_dim: int = 16) -> Tensor:
    """A contiguous bf16 tensor as SDPA takes it."""
    return torch.randn(2, heads, seqlen, head_dim).bfloat16()


def packed(total: int = 50, heads: int = 2) -> Tensor:
    return torch.randn(total, heads, 16).bfloat16()


def with_gradients(
    function: Callable[..., Tensor], operands: tuple[Tensor, ...], **options: Any
) -> tuple[Tensor, ...]:
    """The output and the gradients of a cotangent that is the same in every call."""
    leaves = tuple(x.clone().requires_grad_() for x in operands)
    out = function(*leaves, **options)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    return out.detach(), *torch.autograd.grad(out, leaves, dout)


def assert_equal(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)
