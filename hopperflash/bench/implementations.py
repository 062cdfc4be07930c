"""Who is timed: this package, PyTorch's kernels, and the flash-attn packages that are installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from hopperflash import api
from hopperflash.errors import InvalidArgument

Attend = Callable[[Tensor, Tensor, Tensor, bool], Tensor]
OURS = "hopperflash"

_SDPA = {
    "sdpa-flash": SDPBackend.FLASH_ATTENTION,
    "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa-math": SDPBackend.MATH,
}
_SDPA_ON_CPU = ("sdpa-flash", "sdpa-math")
# Module of `flash_attn_func`, whose first arguments are q, k, v (batch, seqlen, heads, head_dim).
_FLASH_ATTN = {
    "fa2": "flash_attn",
    "fa3": "flash_attn_interface",
    "fa4": "flash_attn.cute",
}
NAMES = (OURS, *_SDPA, *_FLASH_ATTN)


@dataclass(frozen=True)
class Implementation:
    """Attention of (batch, seqlen, heads, head_dim) tensors; `attend` is None where it is absent,
    and `absent` says why."""

    name: str
    attend: Attend | None
    absent: str = ""


def implementations(names: tuple[str, ...], device: str) -> list[Implementation]:
    """Those named, present on this machine or not. `InvalidArgument` for names of nothing."""
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        raise InvalidArgument(
            f"no implementation is called {', '.join(unknown)}: give of {', '.join(NAMES)}"
        )
    return [_found(name, device) for name in names]


def _found(name: str, device: str) -> Implementation:
    if name == OURS:
        return Implementation(name, _ours)
    if device == "cpu" and name not in _SDPA_ON_CPU:
        return Implementation(name, None, "has no kernel for CPU tensors")
    if name in _SDPA:
        return Implementation(name, partial(_sdpa, _SDPA[name]))
    try:
        function = importlib.import_module(_FLASH_ATTN[name]).flash_attn_func
    except Exception as missing:  # an extension of another ABI raises what it likes
        return Implementation(name, None, f"{type(missing).__name__}: {missing}")
    return Implementation(name, partial(_flash_attn, function))


def _ours(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    out = api.flash_attn_func(q, k, v, causal=causal)
    assert isinstance(out, Tensor)
    return out


def _sdpa(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Views with heads first: every fused kernel takes them as they are."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(backend):
        out = scaled_dot_product_attention(
            q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]
        )
    return out.transpose(1, 2)


def _flash_attn(
    function: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, causal: bool
) -> Tensor:
    """FlashAttention-3 and -4 return the LSE too, some releases always."""
    found = function(q, k, v, causal=causal)
    out: Tensor = found[0] if isinstance(found, tuple) else found
    return out
