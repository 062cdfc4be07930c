"""Attention as torch operators: `torch.ops.hopperflash.fwd`, `bwd`, `varlen_fwd`, `varlen_bwd`.

What tracing, autograd, autocast, FLOP counters and DTensor need of an operator is registered here.
"""

from __future__ import annotations

from hopperflash.ops import autocast, autograd, fake, flops, kernels
from hopperflash.ops.call import attention, gradients

__all__ = ["attention", "gradients"]

for _aspect in (kernels, fake, autograd, autocast, flops):
    _aspect.register()
