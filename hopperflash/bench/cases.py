"""What is timed: the shapes and the FLOP counts that papers and other benchmarks report by."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hopperflash.problem import Direction, DType

MODEL_DIM = 2048  # heads * head_dim, as FlashAttention-2 and -3 report

CONVENTIONS = (
    "forward: 2 b h s^2 (d + dv) FLOP, with dv = d 4 b h s^2 d: two matrix products",
    "backward: 2 b h s^2 (3 d + 2 dv) FLOP, with dv = d 2.5 times the forward: five of them",
    "causal: half of either, the diagonal's own half not counted",
)


@dataclass(frozen=True)
class Shape:
    """Self-attention of (batch, seqlen, heads, head_dim), keys as long as queries."""

    batch: int
    seqlen: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool
    dtype: DType

    def flops(self, direction: Direction) -> int:
        """By the conventions above, whatever a kernel really executes."""
        d = dv = self.head_dim
        per_pair = 2 * (d + dv) if direction == "forward" else 2 * (3 * d + 2 * dv)
        pairs = self.batch * self.heads * self.seqlen**2
        return pairs * per_pair // (2 if self.causal else 1)

    @property
    def mask(self) -> str:
        return "causal" if self.causal else "full"

    def __str__(self) -> str:
        heads = f"{self.heads}" if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"
        return (
            f"batch {self.batch}, seqlen {self.seqlen:,}, {heads} heads of {self.head_dim},"
            f" {self.mask}, {self.dtype.value}"
        )


@dataclass(frozen=True)
class Grid:
    """Every head dim with every mask and every length, at a fixed number of tokens.

    Without `heads` they are `model_dim` / head_dim; without `batch` it is `tokens` / seqlen, one at
    least.
    """

    head_dims: Sequence[int]
    seqlens: Sequence[int]
    masks: Sequence[bool]
    dtype: DType
    tokens: int
    model_dim: int = MODEL_DIM
    batch: int | None = None
    heads: int | None = None
    kv_heads: int | None = None

    def shapes(self) -> Iterator[Shape]:
        """Lengths fastest, as they are read along a plot."""
        for head_dim in self.head_dims:
            heads = self.heads or max(1, self.model_dim // head_dim)
            for causal in self.masks:
                for seqlen in self.seqlens:
                    yield Shape(
                        batch=self.batch or max(1, self.tokens // seqlen),
                        seqlen=seqlen,
                        heads=heads,
                        kv_heads=self.kv_heads or heads,
                        head_dim=head_dim,
                        causal=causal,
                        dtype=self.dtype,
                    )
