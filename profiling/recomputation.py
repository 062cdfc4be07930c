"""An attention backward from stored probabilities, and one that computes them again.

    python -m profiling.recomputation stored|recomputed LENGTH

is what Nsight Compute looks into: one backward on the GPU, warm. Batch 2, 16 heads, head dim 64,
bf16, no mask; both ways get the same operands and the same dO. "stored" keeps P of the forward, as
a chain of matrix products under autograd does; "recomputed" is `hopperflash.flash_attn_func`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import hopperflash

BATCH, HEADS, HEAD_DIM = 2, 16, 64
SCALE = HEAD_DIM**-0.5
WAYS = ("stored", "recomputed")


class StoredAttention(torch.autograd.Function):
    """Softmax attention that keeps its probabilities, (batch, heads, seqlen, ...)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = _product(q, k.mT).float().mul_(SCALE)
        probabilities = torch.softmax(scores, dim=-1).to(q.dtype)
        ctx.save_for_backward(q, k, v, probabilities)
        return _product(probabilities, v)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, ...]:
        q, k, v, probabilities = ctx.saved_tensors
        dv = _product(probabilities.mT, dout)
        dscores = _product(dout, v.mT).float()
        dscores -= (dscores * probabilities).sum(dim=-1, keepdim=True)
        dscores = dscores.mul_(probabilities).mul_(SCALE).to(q.dtype)
        return _product(dscores, k), _product(dscores.mT, q), dv


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Of (batch, heads, rows, columns). On a CPU in fp32, head by head: PyTorch's own product of
    16-bit matrices takes many times as long where the CPU has no instructions for them, and what
    both ways compare would be that."""
    if a.is_cuda:
        return a @ b
    out = a.new_empty(*a.shape[:-1], b.shape[-1])
    for x, y, z in zip(*(t.flatten(0, 1) for t in (a, b, out)), strict=True):
        z.copy_(x.float() @ y.float())
    return out


def stored(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Operands and result (batch, seqlen, heads, head_dim)."""
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    return StoredAttention.apply(*heads_first).transpose(1, 2)


@dataclass(frozen=True)
class Operands:
    """Q, K, V and dO, (batch, seqlen, heads, head_dim); the same for the same length."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor

    @classmethod
    def random(cls, seqlen: int, device: str) -> Operands:
        torch.manual_seed(seqlen)
        shape = (BATCH, seqlen, HEADS, HEAD_DIM)
        q, k, v, dout = (torch.randn(shape).bfloat16().to(device) for _ in range(4))
        return cls(*(x.requires_grad_() for x in (q, k, v)), dout)

    def forward(self, way: str) -> Backward:
        attend = stored if way == "stored" else hopperflash.flash_attn_func
        return Backward(self, attend(self.q, self.k, self.v))


@dataclass(frozen=True)
class Backward:
    """What a forward left, to be called as often as one likes."""

    operands: Operands
    out: Tensor

    def __call__(self) -> tuple[Tensor, ...]:
        """dQ, dK and dV."""
        x = self.operands
        return torch.autograd.grad(self.out, (x.q, x.k, x.v), x.dout, retain_graph=True)


def main() -> None:
    """One backward between the profiler's start and stop, after one that it does not see."""
    way, seqlen = sys.argv[1:]
    backward = Operands.random(int(seqlen), "cuda").forward(way)
    backward()
    torch.cuda.synchronize()
    with torch.cuda.profiler.profile():
        backward()
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
