"""Bytes that attention moves through global memory when it materialises its matrices."""

from __future__ import annotations

from dataclasses import dataclass

from hopperflash.problem import AttnProblem, Direction


@dataclass(frozen=True)
class Traffic:
    """Bytes read from and written to global memory."""

    loaded: int
    stored: int

    @property
    def total(self) -> int:
        return self.loaded + self.stored


def materialized_traffic(problem: AttnProblem, direction: Direction = "forward") -> Traffic:
    """Traffic of one kernel for each formula of a direction, in the input dtype.

    Forward: S = Q K^T, P = softmax(S), O = P V. Backward, with P saved: dV = P^T dO, dP = dO V^T,
    dS = P (dP - rowsum(P dP)), dQ = dS K, dK = dS^T Q. A kernel reads each of its operands once and
    writes its result once; S, P, dP and dS hold all seqlen_q * seqlen_k pairs of each query head,
    whatever the mask.
    """
    p = problem
    rows_q, rows_k = p.batch * p.heads_q * p.seqlen_q, p.batch * p.heads_k * p.seqlen_k
    scores = rows_q * p.seqlen_k
    q, out = rows_q * p.head_dim, rows_q * p.head_dim_v
    inputs = q + rows_k * (p.head_dim + p.head_dim_v)
    if direction == "forward":
        loaded, stored = inputs + 2 * scores, out + 2 * scores
    else:
        loaded, stored = inputs + 2 * out + 5 * scores, inputs + 2 * scores
    return Traffic(loaded * p.dtype.itemsize, stored * p.dtype.itemsize)
