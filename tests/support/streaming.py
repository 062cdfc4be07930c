"""The streaming code as autograd would use it, to compare its gradients with a reference's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hopperflash import streaming
from hopperflash.problem import GRADIENTS
from hopperflash.problem.mask import MaskSpec


def streaming_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: MaskSpec,
    *,
    softmax_scale: float,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """`hopperflash.streaming.streaming_attention`, differentiable."""
    options = {"softmax_scale": softmax_scale, "softcap": softcap}
    out, lse = _Streaming.apply(q, k, v, mask, options)  # type: ignore[no-untyped-call]
    return out, lse


class _Streaming(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: MaskSpec, options: dict[str, float]
    ) -> tuple[Tensor, Tensor]:
        out, lse = streaming.streaming_attention(q, k, v, mask, **options)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mask, ctx.options = mask, options
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:
        operands = dict(zip(("q", "k", "v", "out", "lse"), ctx.saved_tensors, strict=True))
        operands["dout"] = torch.zeros_like(operands["out"]) if dout is None else dout
        if dlse is not None:
            operands["dlse"] = dlse
        wanted = [
            name
            for name, is_needed in zip(GRADIENTS, ctx.needs_input_grad, strict=False)
            if is_needed
        ]
        found = streaming.streaming_gradients(operands, ctx.mask, gradients=wanted, **ctx.options)
        return *(found.get(name) for name in GRADIENTS), None, None
