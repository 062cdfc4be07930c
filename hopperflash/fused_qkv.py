"""The public functions for projections that leave q, k and v, or k and v, in one tensor.

flash-attn calls these tensors packed, which here means sequences without padding. They are read
where they lie; autograd puts their gradients into one tensor of the same shape.
"""

from __future__ import annotations

from torch import Tensor

from hopperflash.api import WindowSize, flash_attn_func, flash_attn_varlen_func
from hopperflash.errors import InvalidArgument


def flash_attn_qkvpacked_func(  # noqa: PLR0913, PLR0917 - flash-attn's positional order
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    return_lse: bool = False,
    out: Tensor | None = None,
    backend: str | None = None,
    sm_margin: int = 0,
) -> Tensor | tuple[Tensor, Tensor]:
    """`flash_attn_func` of qkv (batch, seqlen, 3, heads, head_dim)."""
    q, k, v = _parts("qkv", qkv, 3, "(batch, seqlen, 3, heads, head_dim)")
    return flash_attn_func(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        return_lse=return_lse,
        out=out,
        backend=backend,
        sm_margin=sm_margin,
    )


def flash_attn_kvpacked_func(  # noqa: PLR0913, PLR0917 - flash-attn's positional order
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    return_lse: bool = False,
    out: Tensor | None = None,
    backend: str | None = None,
    sm_margin: int = 0,
) -> Tensor | tuple[Tensor, Tensor]:
    """`flash_attn_func` of q (batch, seqlen_q, heads_q, head_dim) and kv (batch, seqlen_k, 2,
    heads_k, head_dim)."""
    k, v = _parts("kv", kv, 2, "(batch, seqlen_k, 2, heads_k, head_dim)")
    return flash_attn_func(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        return_lse=return_lse,
        out=out,
        backend=backend,
        sm_margin=sm_margin,
    )


def flash_attn_varlen_qkvpacked_func(  # noqa: PLR0913, PLR0917 - flash-attn's positional order
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int | Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    seqused: Tensor | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    backend: str | None = None,
    sm_margin: int = 0,
) -> Tensor | tuple[Tensor, Tensor]:
    """`flash_attn_varlen_func` of qkv (total, 3, heads, head_dim)."""
    q, k, v = _parts("qkv", qkv, 3, "(total, 3, heads, head_dim)")
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        seqused_q=seqused,
        seqused_k=seqused,
        return_lse=return_lse,
        out=out,
        backend=backend,
        sm_margin=sm_margin,
    )


def flash_attn_varlen_kvpacked_func(  # noqa: PLR0913, PLR0917 - flash-attn's positional order
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    backend: str | None = None,
    sm_margin: int = 0,
) -> Tensor | tuple[Tensor, Tensor]:
    """`flash_attn_varlen_func` of q (total_q, heads_q, head_dim) and kv (total_k, 2, heads_k,
    head_dim)."""
    k, v = _parts("kv", kv, 2, "(total_k, 2, heads_k, head_dim)")
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        return_lse=return_lse,
        out=out,
        backend=backend,
        sm_margin=sm_margin,
    )


def _parts(name: str, fused: Tensor, count: int, layout: str) -> tuple[Tensor, ...]:
    """Views of q, k and v, or of k and v."""
    if not isinstance(fused, Tensor):
        raise InvalidArgument(f"{name} is a {type(fused).__name__}: give a torch.Tensor {layout}")
    if fused.dim() != layout.count(",") + 1 or fused.shape[-3] != count:
        raise InvalidArgument(f"{name} has shape {tuple(fused.shape)}: give {layout}")
    return fused.unbind(-3)
