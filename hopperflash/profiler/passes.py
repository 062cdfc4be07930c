"""What a profiler looks at: warm forwards and backwards, each pass in an NVTX range.

The backward is called directly. Autograd would launch it from a thread of its own, which the ranges
of this thread do not hold: neither profiler would find it in its pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hopperflash import api
from hopperflash.profiler import RANGE

Marks = Callable[[str], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Attention:
    """Operands, options of `flash_attn_func`, and offsets where the operands are packed."""

    q: Tensor
    k: Tensor
    v: Tensor
    options: Mapping[str, Any]
    cu_seqlens: Tensor | None = None
    max_seqlen: int = 0

    def on(self, device: str, **options: Any) -> Attention:
        """The same on another device, with more options."""
        q, k, v = (operand.to(device) for operand in (self.q, self.k, self.v))
        cu_seqlens = None if self.cu_seqlens is None else self.cu_seqlens.to(device)
        return Attention(q, k, v, {**self.options, **options}, cu_seqlens, self.max_seqlen)

    def forward(self) -> tuple[Tensor, Tensor]:
        """The output and the LSE."""
        options = {**self.options, "return_lse": True}
        if self.cu_seqlens is None:
            found = api.flash_attn_func(self.q, self.k, self.v, **options)
        else:
            cu, longest = self.cu_seqlens, self.max_seqlen
            found = api.flash_attn_varlen_func(
                self.q, self.k, self.v, cu, cu, longest, longest, **options
            )
        out, lse = found
        return out, lse

    def backward(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of the sum of the output."""
        return api.flash_attn_backward(
            torch.ones_like(out),
            *(self.q, self.k, self.v, out, lse),
            **self.options,
            cu_seqlens_q=self.cu_seqlens,
            cu_seqlens_k=self.cu_seqlens,
        )


@dataclass(frozen=True)
class Schedule:
    """Which passes run, and how often: `warm_up` times before the profiler looks."""

    passes: tuple[str, ...]
    iterations: int
    warm_up: int


def run(attention: Attention, schedule: Schedule) -> None:
    """Runs the passes; on a GPU the profiler is told to look after the warm-up, and until the end.

    Compiling, loading and a forward that only the backward needs are not looked at.
    """
    on_gpu = attention.q.is_cuda
    saved: tuple[Tensor, ...] = () if "forward" in schedule.passes else attention.forward()
    for _ in range(schedule.warm_up):
        saved = _iteration(attention, schedule.passes, nullcontext, saved)
    if on_gpu:
        torch.cuda.synchronize()
    with torch.cuda.profiler.profile() if on_gpu else nullcontext():
        for _ in range(schedule.iterations):
            saved = _iteration(attention, schedule.passes, _range if on_gpu else nullcontext, saved)
        if on_gpu:
            torch.cuda.synchronize()


def _iteration(
    attention: Attention, passes: tuple[str, ...], mark: Marks, saved: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """The output and the LSE that the next backward takes."""
    if "forward" in passes:
        with mark("forward"):
            saved = attention.forward()
    if "backward" in passes:
        with mark("backward"):
            attention.backward(*saved)
    return saved


def _range(name: str) -> AbstractContextManager[Any]:
    return torch.cuda.nvtx.range(RANGE + name)
