"""Any problem as a list of sequences, and its results in fp64, one sequence after the other.

Dense problems are sequences of equal lengths, one a batch entry; packed ones lie in one tensor of
rows, between others that belong to none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hopperflash.problem.mask import MaskSpec
from hopperflash.reference import (
    Gradients,
    gradient_terms,
    hidden_pairs,
    low_precision_attention,
    low_precision_gradients,
    materialized_attention,
    materialized_gradients,
)
from tests.support.tolerance import assert_close

STATISTICS = ("lse", "dlse")  # (heads, rows); everything else is (rows, heads, head_dim)
KEY_ROWS = ("k", "v", "dk", "dv")


class Rows(NamedTuple):
    """Where a sequence lies among the rows of its tensors."""

    q: range
    k: range


class Results(NamedTuple):
    """Results of packed rows, or something else by result."""

    out: Tensor  # (rows of q, heads_q, head_dim_v)
    lse: Tensor  # (heads_q, rows of q)
    dq: Tensor
    dk: Tensor
    dv: Tensor


@dataclass(frozen=True)
class Attended:
    """What is computed over every sequence."""

    mask: MaskSpec
    softmax_scale: float
    softcap: float = 0.0

    @property
    def options(self) -> dict[str, Any]:
        return {
            "mask": self.mask,
            "softmax_scale": self.softmax_scale,
            "softcap": self.softcap,
        }


def check_results(
    attended: Attended, operands: dict[str, Tensor], rows: list[Rows], found: dict[str, Tensor]
) -> None:
    """Results of packed rows against fp64 by the tolerance rule, and exact zeros and -inf where no
    sequence lies or nothing is seen.

    `operands` holds "q", "k", "v", "dout", and "dlse" where the LSE is used; `found` results by
    name.
    """
    references = (_exact, _low_precision, _terms)
    want, low, terms = (_over_sequences(each, attended, operands, rows) for each in references)
    factor = 3.0 if attended.softcap else 2.0
    for name, result in found.items():
        reference, yardstick, magnitudes = (getattr(x, name) for x in (want, low, terms))
        assert_close(
            result,
            reference,
            yardstick,
            factor=factor,
            terms=None if name == "out" else magnitudes,
            name=name,
        )
        unseen = _unseen(attended, operands, rows)["k" if name in KEY_ROWS else "q"]
        at = (slice(None), unseen) if name in STATISTICS else unseen
        exact = -torch.inf if name == "lse" else 0.0
        assert (result[at] == exact).all(), f"{name} is not {exact} where nothing is seen"


def _unseen(attended: Attended, operands: dict[str, Tensor], rows: list[Rows]) -> dict[str, Tensor]:
    """Rows of queries that see no key, and of keys that no query sees."""
    found = {side: torch.ones(len(operands[side]), dtype=torch.bool) for side in "qk"}
    for q, k in rows:
        hidden = hidden_pairs(attended.mask, len(q), len(k))
        found["q"][q.start : q.stop] = hidden.all(1)
        found["k"][k.start : k.stop] = hidden.all(0)
    return found


def _over_sequences(
    compute: Callable[[Attended, dict[str, Tensor]], Results],
    attended: Attended,
    operands: dict[str, Tensor],
    rows: list[Rows],
) -> Results:
    """One result of all rows; those outside of the sequences are 0, and -inf of the LSE."""
    q, k, v = (operands[name] for name in ("q", "k", "v"))
    shapes = {"out": (*q.shape[:2], v.shape[2]), "lse": (q.shape[1], q.shape[0])}
    shapes |= {"dq": q.shape, "dk": k.shape, "dv": v.shape}
    whole = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}
    whole["lse"] -= torch.inf
    for sequence in rows:
        cut = {name: x[_index(name, sequence)][None] for name, x in operands.items()}
        for name, result in compute(attended, cut)._asdict().items():
            whole[name][_index(name, sequence)] = result[0].double()
    return Results(**whole)


def _index(name: str, sequence: Rows) -> Any:
    taken = sequence.k if name in KEY_ROWS else sequence.q
    along = slice(taken.start, taken.stop)
    return (slice(None), along) if name in STATISTICS else along


def _inputs(operands: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    return operands["q"], operands["k"], operands["v"]


def _exact(attended: Attended, operands: dict[str, Tensor]) -> Results:
    inputs, cotangents = _inputs(operands), (operands["dout"], operands.get("dlse"))
    gradients = materialized_gradients(inputs, *cotangents, **attended.options)
    return Results(*materialized_attention(*inputs, **attended.options), *gradients)


def _low_precision(attended: Attended, operands: dict[str, Tensor]) -> Results:
    inputs, cotangents = _inputs(operands), (operands["dout"], operands.get("dlse"))
    gradients = low_precision_gradients(inputs, *cotangents, **attended.options)
    return Results(*low_precision_attention(*inputs, **attended.options), *gradients)


def _terms(attended: Attended, operands: dict[str, Tensor]) -> Results:
    inputs, cotangents = _inputs(operands), (operands["dout"], operands.get("dlse"))
    gradients: Gradients = gradient_terms(inputs, *cotangents, **attended.options)
    out, lse = materialized_attention(*inputs, **attended.options)
    return Results(out, lse, *gradients)


def poison(x: Tensor, nobodys: Tensor) -> None:
    """Fills rows that nobody may read, (rows,) bool, with NaN and +Inf in turn: a maximum passes
    over the one and keeps the other."""
    (rows,) = nobodys.nonzero(as_tuple=True)
    x[rows[::2]], x[rows[1::2]] = torch.nan, torch.inf


def dense_rows(batch: int, seqlen_q: int, seqlen_k: int) -> Iterator[Rows]:
    """Batch entries as sequences of (batch * seqlen) rows."""
    for entry in range(batch):
        first_q, first_k = entry * seqlen_q, entry * seqlen_k
        yield Rows(range(first_q, first_q + seqlen_q), range(first_k, first_k + seqlen_k))
