"""Bytes that attention moves through global memory when it materialises its matrices."""

from __future__ import annotations

from dataclasses import dataclass

from hopperflash.problem import AttnProblem


@dataclass(frozen=True)
class Traffic:
    """Bytes read from and written to global memory."""

    loaded: int
    stored: int

    @property
    def total(self) -> int:
        return self.loaded + self.stored


def materialized_traffic(problem: AttnProblem) -> Traffic:
    """Traffic of S = Q K^T, P = softmax(S), O = P V as three kernels in the input dtype.

    Every matrix is read once by its consumer and written once by its producer; S and P hold all
    seqlen_q * seqlen_k pairs of each query head, whatever the mask.
    """
    p = problem
    rows_q, rows_k = p.batch * p.heads_q * p.seqlen_q, p.batch * p.heads_k * p.seqlen_k
    scores = rows_q * p.seqlen_k
    loaded = rows_q * p.head_dim + rows_k * (p.head_dim + p.head_dim_v) + 2 * scores
    stored = rows_q * p.head_dim_v + 2 * scores
    return Traffic(loaded * p.dtype.itemsize, stored * p.dtype.itemsize)
