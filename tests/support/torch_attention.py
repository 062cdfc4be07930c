"""PyTorch's attention, called as `hopperflash.flash_attn_func` is, to compare the two."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl

import hopperflash.integrations.torch  # noqa: F401 - registers the name


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
