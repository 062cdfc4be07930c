"""Exact attention on CPU tensors in O(seqlen) memory: the `cpu` backend.

The forward keeps, for a tile of query rows, the running row maximum m, row sum l and output
numerator, and rescales them as key tiles stream by; the backward recomputes the probabilities of
each tile from Q, K and the log-sum-exp (FlashAttention-2, arXiv 2307.08691, algorithms 1 and 2):

    forward    m' = max(m, rowmax S),  P = exp(S - m'),  l' = exp(m - m') l + rowsum P,
               acc' = exp(m - m') acc + P V;   O = acc / l,  LSE = m + log l
    backward   P = exp(S - LSE),  dV = P^T dO,  dP = dO V^T,
               dS = P * (dP - (rowsum(dO * O) - dLSE)),  dQ = scale dS K,  dK = scale dS^T Q

Tiles are (batch * heads_k, rows, ...), where the query heads that share a key head are stacked
along the rows: that sums dK and dV over the group inside the matrix product.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hopperflash.problem import GRADIENTS
from hopperflash.problem.mask import MaskSpec
from hopperflash.reference import hidden_pairs

_TILE_K = 512
_SCORE_TILE_ELEMENTS = 1 << 20  # 4 MiB of fp32


def streaming_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: MaskSpec,
    *,
    softmax_scale: float,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Attention over tiles of keys; `streaming_gradients` has its gradients, autograd has not.

    Computes in fp32 (fp64 for fp64 inputs). Tiles without visible pairs are skipped, and hidden
    pairs contribute nothing even where the operands hold NaN or Inf.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim), any strides.
        k: (batch, seqlen_k, heads_k, head_dim); query head h reads head h // (heads_q // heads_k).
        v: (batch, seqlen_k, heads_k, head_dim_v).

    Returns:
        out (batch, seqlen_q, heads_q, head_dim_v) in the dtype of q, and the natural-log LSE
        (batch, heads_q, seqlen_q) in the dtype of the computation. A row that sees no key has
        output 0, LSE -inf and zero gradients.
    """
    tiling = _Tiling.of(q, k, mask, softmax_scale, softcap)
    with torch.autocast(q.device.type, enabled=False):
        return _forward(q, k, v, tiling)


def streaming_gradients(
    operands: Mapping[str, Tensor],
    mask: MaskSpec,
    *,
    softmax_scale: float,
    softcap: float = 0.0,
    gradients: Sequence[str] = GRADIENTS,
) -> dict[str, Tensor]:
    """The gradients of `streaming_attention` from its results, which may be those of more keys.

    Args:
        operands: "q", "k", "v", "out", "lse" and "dout", and "dlse" where the LSE is used.
        gradients: which of "dq", "dk" and "dv".

    Returns:
        Those, in the dtypes of q, k and v.
    """
    q, k, v, out, lse, dout = (operands[n] for n in ("q", "k", "v", "out", "lse", "dout"))
    tiling = _Tiling.of(q, k, mask, softmax_scale, softcap)
    dlse, needed = operands.get("dlse"), [name in gradients for name in GRADIENTS]
    with torch.autocast(q.device.type, enabled=False):
        found = _backward((q, k, v, out, lse), dout, dlse, tiling, needed=needed)
    return {name: x for name, x in zip(GRADIENTS, found, strict=True) if x is not None}


@dataclass(frozen=True)
class _KeyTile:
    columns: range
    hidden: Tensor | None  # Bool (group * rows, columns); None where every pair is visible

    @property
    def slice(self) -> slice:
        return slice(self.columns.start, self.columns.stop)


@dataclass(frozen=True)
class _Tiling:
    """Which score tiles are computed, and how."""

    mask: MaskSpec
    softmax_scale: float
    softcap: float
    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_k: int
    group: int
    tile_q: int

    @classmethod
    def of(cls, q: Tensor, k: Tensor, mask: MaskSpec, scale: float, softcap: float) -> _Tiling:
        (batch, seqlen_q, heads_q, _), (_, seqlen_k, heads_k, _) = q.shape, k.shape
        tile_q = _SCORE_TILE_ELEMENTS // (_TILE_K * max(1, batch * heads_q))
        tile_q = min(max(tile_q, 32), 512)
        group = heads_q // heads_k
        return cls(mask, scale, softcap, batch, seqlen_q, seqlen_k, heads_k, group, tile_q)

    def query_tiles(self) -> Iterator[range]:
        for start in range(0, self.seqlen_q, self.tile_q):
            yield range(start, min(start + self.tile_q, self.seqlen_q))

    def key_tiles(self, rows: range) -> Iterator[_KeyTile]:
        """Tiles that together hold every key visible to one of `rows`."""
        shift = self.seqlen_k - self.seqlen_q
        left, right = self.mask.left, self.mask.right
        first = 0 if left is None else max(0, rows[0] + shift - left)
        last = self.seqlen_k if right is None else min(self.seqlen_k, rows[-1] + shift + right + 1)
        for start in range(first, last, _TILE_K):
            columns = range(start, min(start + _TILE_K, last))
            inside_left = left is None or rows[-1] + shift - left <= columns[0]
            inside_right = right is None or columns[-1] <= rows[0] + shift + right
            hidden = None
            if not (inside_left and inside_right):
                hidden = hidden_pairs(
                    self.mask, self.seqlen_q, self.seqlen_k, rows=rows, columns=columns
                ).repeat(self.group, 1)
            yield _KeyTile(columns, hidden)

    def capped_scores(self, q_scaled: Tensor, k: Tensor) -> Tensor:
        scores = q_scaled @ k.mT
        if self.softcap > 0:
            scores.div_(self.softcap).tanh_().mul_(self.softcap)
        return scores


def _forward(q: Tensor, k: Tensor, v: Tensor, tiling: _Tiling) -> tuple[Tensor, Tensor]:
    batch, seqlen_q, heads_q, _ = q.shape
    compute_dtype = _compute_dtype(q)
    queries = _by_key_head(q, tiling.group, compute_dtype).mul_(tiling.softmax_scale)
    keys, values = (_by_key_head(x, 1, compute_dtype)[:, 0] for x in (k, v))
    out = q.new_empty(batch, seqlen_q, heads_q, v.shape[-1])
    lse = q.new_empty(batch, heads_q, seqlen_q, dtype=compute_dtype)
    for rows in tiling.query_tiles():
        tile = slice(rows.start, rows.stop)
        out_rows, lse_rows = _forward_rows(
            queries[:, :, tile].flatten(1, 2), keys, values, tiling, rows
        )
        out[:, tile] = _by_query_head(out_rows, tiling, tiling.group)
        lse[:, :, tile] = lse_rows.view(batch, heads_q, len(rows))
    return out, lse


def _forward_rows(
    q_scaled: Tensor, keys: Tensor, values: Tensor, tiling: _Tiling, rows: range
) -> tuple[Tensor, Tensor]:
    """Output (n, group * rows, head_dim_v) and LSE (n, group * rows) of one tile of query rows."""
    row_max = q_scaled.new_full(q_scaled.shape[:2], -math.inf)
    row_sum = torch.zeros_like(row_max)
    acc = q_scaled.new_zeros(*q_scaled.shape[:2], values.shape[-1])
    for tile in tiling.key_tiles(rows):
        scores = tiling.capped_scores(q_scaled, keys[:, tile.slice])
        if tile.hidden is not None:
            scores.masked_fill_(tile.hidden, -math.inf)
        row_max_new = torch.maximum(row_max, scores.amax(dim=-1))
        # A row that has seen no key yet subtracts 0: -inf - -inf would be NaN.
        subtrahend = row_max_new.masked_fill(row_max_new == -math.inf, 0.0)
        probabilities = scores.sub_(subtrahend[..., None]).exp_()
        rescale = torch.exp(row_max - subtrahend)
        row_sum = row_sum * rescale + probabilities.sum(dim=-1)
        acc.mul_(rescale[..., None])
        acc += _visible_product(probabilities, values[:, tile.slice], tile.hidden)
        row_max = row_max_new
    lse = row_max + row_sum.log()
    return acc.div_(row_sum.masked_fill(row_sum == 0, 1.0)[..., None]), lse


def _backward(
    saved: tuple[Tensor, ...],
    dout: Tensor,
    dlse: Tensor | None,
    tiling: _Tiling,
    needed: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    q, k, v, out, lse = saved
    compute_dtype = _compute_dtype(q)
    queries, douts = (_by_key_head(x, tiling.group, compute_dtype) for x in (q, dout))
    queries.mul_(tiling.softmax_scale)
    keys, values = (_by_key_head(x, 1, compute_dtype)[:, 0] for x in (k, v))

    delta = (dout.to(compute_dtype) * out).sum(dim=-1).transpose(1, 2)
    if dlse is not None:
        delta = delta - dlse
    # A row without keys has P = 0, whatever else it sees: its LSE may come from elsewhere.
    lse = lse.masked_fill(lse == -math.inf, math.inf)
    delta, lse = (x.reshape(len(keys), tiling.group, tiling.seqlen_q) for x in (delta, lse))

    dq = torch.empty_like(q, memory_format=torch.contiguous_format) if needed[0] else None
    dk = torch.zeros_like(keys) if needed[1] else None
    dv = torch.zeros_like(values) if needed[2] else None
    for rows in tiling.query_tiles():
        tile = slice(rows.start, rows.stop)
        stacked = (x[:, :, tile].flatten(1, 2) for x in (queries, douts, lse, delta))
        block = _QueryRows(rows, *stacked)
        dq_rows = None if dq is None else torch.zeros_like(block.q_scaled)
        _accumulate_gradients(block, keys, values, tiling, (dq_rows, dk, dv))
        if dq is not None and dq_rows is not None:
            dq_rows.mul_(tiling.softmax_scale)
            dq[:, tile] = _by_query_head(dq_rows, tiling, tiling.group)
    dk_out = None if dk is None else _by_query_head(dk, tiling, 1).to(k.dtype)
    dv_out = None if dv is None else _by_query_head(dv, tiling, 1).to(v.dtype)
    return dq, dk_out, dv_out


@dataclass(frozen=True)
class _QueryRows:
    """What the backward reads of one tile of query rows: (n, group * rows) or (..., head_dim)."""

    rows: range
    q_scaled: Tensor
    dout: Tensor
    lse: Tensor
    delta: Tensor  # rowsum(dO * O) - dLSE


def _accumulate_gradients(
    block: _QueryRows,
    keys: Tensor,
    values: Tensor,
    tiling: _Tiling,
    gradients: tuple[Tensor | None, Tensor | None, Tensor | None],
) -> None:
    """Adds what one tile of query rows contributes to dQ / scale of its rows, to dK and to dV."""
    dq_rows, dk, dv = gradients
    for tile in tiling.key_tiles(block.rows):
        k, v, hidden = keys[:, tile.slice], values[:, tile.slice], tile.hidden
        hidden_t = None if hidden is None else hidden.mT
        scores = tiling.capped_scores(block.q_scaled, k)
        probabilities = torch.exp(scores - block.lse[..., None])
        if hidden is not None:  # also clears exp(S - -inf) of rows that see no key
            probabilities.masked_fill_(hidden, 0.0)
        if dv is not None:
            dv[:, tile.slice] += _visible_product(probabilities.mT, block.dout, hidden_t)
        if dq_rows is None and dk is None:
            continue
        dscores = (block.dout @ v.mT).sub_(block.delta[..., None]).mul_(probabilities)
        if tiling.softcap > 0:
            dscores *= 1.0 - scores.div_(tiling.softcap).square_()
        if hidden is not None:
            dscores.masked_fill_(hidden, 0.0)
        if dq_rows is not None:
            dq_rows += _visible_product(dscores, k, hidden)
        if dk is not None:
            dk[:, tile.slice] += _visible_product(dscores.mT, block.q_scaled, hidden_t)


def _visible_product(weights: Tensor, operand: Tensor, hidden: Tensor | None) -> Tensor:
    """`weights @ operand`, to which hidden pairs add nothing, not even 0 * NaN.

    Args:
        weights: (n, rows, inner), zero where hidden.
        operand: (n, inner, columns).
        hidden: Bool (rows, inner), or None where every pair is visible.
    """
    if hidden is None:
        return weights @ operand
    finite = operand.isfinite()
    if finite.all():
        return weights @ operand
    product = weights @ operand.masked_fill(~finite, 0.0)
    stray = operand.masked_fill(finite, 0.0)
    for index in (~finite).any(dim=-1).any(dim=0).nonzero().flatten().tolist():
        outer = weights[:, :, index, None] * stray[:, None, index, :]
        product += outer.masked_fill_(hidden[:, index, None], 0.0)
    return product


def _compute_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _by_key_head(x: Tensor, group: int, dtype: torch.dtype) -> Tensor:
    """(batch, seqlen, heads, d) -> a fresh (batch * heads_k, group, seqlen, d) in `dtype`."""
    batch, seqlen, heads, head_dim = x.shape
    shape = (batch, heads // group, group, seqlen, head_dim)
    # torch 2.13 copies contiguous fp16 to fp32 without the sign of a lazily negated view.
    x = x.resolve_neg()
    fresh = x.new_empty(shape, dtype=dtype).copy_(x.transpose(1, 2).view(shape))
    return fresh.flatten(0, 1)


def _by_query_head(x: Tensor, tiling: _Tiling, group: int) -> Tensor:
    """(batch * heads_k, group * rows, d) -> (batch, rows, heads_k * group, d)."""
    rows = x.shape[1] // group
    heads = x.view(tiling.batch, tiling.heads_k * group, rows, x.shape[2])
    return heads.transpose(1, 2)
