"""Named cases of packed sequences, and how to check `flash_attn_varlen_func` on one.

The reference computes each sequence by itself. Rows that nobody may read hold NaN and +Inf.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

import hopperflash
from hopperflash.reference import (
    gradient_terms,
    low_precision_gradients,
    materialized_gradients,
)
from tests.support.cases import Inputs, expected, make_inputs
from tests.support.gradient_cases import BackwardCase, Cotangents, make_cotangents
from tests.support.sequences import poison
from tests.support.tolerance import assert_close


class Side(NamedTuple):
    """Sequences along the rows of Q or of K, with rows of nobody before and behind them."""

    lengths: tuple[int, ...]
    used: tuple[int, ...] | None = None
    before: int = 0
    behind: int = 0

    @property
    def offsets(self) -> list[int]:
        return list(accumulate(self.lengths, initial=self.before))

    @property
    def total(self) -> int:
        return self.offsets[-1] + self.behind

    @property
    def pieces(self) -> list[slice]:
        """The rows of each sequence that count."""
        counts = self.lengths if self.used is None else self.used
        return [slice(b, b + n) for b, n in zip(self.offsets[:-1], counts, strict=True)]

    @property
    def nobodys(self) -> Tensor:
        """(total,) whether a row counts for no sequence."""
        mask = torch.ones(self.total, dtype=torch.bool)
        for piece in self.pieces:
            mask[piece] = False
        return mask


NOBODY = Side(())


@dataclass(frozen=True)
class PackedCase(BackwardCase):
    """Sequences as one batch entry, whose `seqlen_q` and `seqlen_k` are the totals."""

    side_q: Side = NOBODY
    side_k: Side = NOBODY

    @property
    def lengths(self) -> dict[str, Tensor]:
        """Arguments of `flash_attn_varlen_func`."""
        tensors = {}
        for name, side in (("q", self.side_q), ("k", self.side_k)):
            tensors[f"cu_seqlens_{name}"] = torch.tensor(side.offsets, dtype=torch.int32)
            tensors[f"max_seqlen_{name}"] = max(side.lengths)
            if side.used is not None:
                tensors[f"seqused_{name}"] = torch.tensor(side.used, dtype=torch.int32)
        return tensors


class Results(NamedTuple):
    """Of `flash_attn_varlen_func` and its backward, with a batch dimension of 1."""

    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def compute(case: PackedCase, device: str = "cpu") -> Results:
    """Output and gradients, from operands whose rows of nobody are poisoned; on the CPU."""
    inputs, cotangents = _poisoned(case)
    operands = tuple(x[0].to(device).requires_grad_() for x in inputs)
    lengths = {n: x.to(device) if isinstance(x, Tensor) else x for n, x in case.lengths.items()}
    out, lse = hopperflash.flash_attn_varlen_func(*operands, **lengths, **case.options)
    incoming = tuple(x[0].to(device) for x in cotangents)
    gradients = torch.autograd.grad((out, lse), operands, incoming)
    return Results(*(x.detach()[None].cpu() for x in (out, lse, *gradients)))


def check_packed(case: PackedCase, found: Results) -> None:
    """Accepts results by the tolerance rule, and exact zeros in rows of nobody."""
    factor = 3.0 if case.softcap else 2.0
    exact, low, terms = (x._asdict() for x in _references(case))
    for name, result in found._asdict().items():
        assert_close(result, exact[name], low[name], factor=factor, terms=terms[name], name=name)
    nobodys_q, nobodys_k = case.side_q.nobodys, case.side_k.nobodys
    assert (found.lse[:, :, nobodys_q] == -math.inf).all(), "lse is not -inf in rows of nobody"
    for name, rows in (("out", nobodys_q), ("dq", nobodys_q), ("dk", nobodys_k), ("dv", nobodys_k)):
        assert not getattr(found, name)[:, rows].any(), f"{name} is not 0 in rows of nobody"


def _poisoned(case: PackedCase) -> tuple[Inputs, Cotangents]:
    inputs, (dout, dlse) = make_inputs(case), make_cotangents(case)
    for x in (inputs.q[0], dout[0], dlse[0].T):
        poison(x, case.side_q.nobodys)
    for x in (inputs.k[0], inputs.v[0]):
        poison(x, case.side_k.nobodys)
    return inputs, Cotangents(dout, dlse)


def _references(case: PackedCase) -> tuple[Results, Results, Results]:
    """Results in fp64, in low precision, and the magnitudes of their terms."""
    inputs, (dout, dlse) = make_inputs(case), make_cotangents(case)
    whole = (_nothing(case, inputs), _nothing(case, inputs), _nothing(case, inputs))
    for rows_q, rows_k in zip(case.side_q.pieces, case.side_k.pieces, strict=True):
        if rows_q.start == rows_q.stop or rows_k.start == rows_k.stop:
            continue
        piece = Inputs(inputs.q[:, rows_q], inputs.k[:, rows_k], inputs.v[:, rows_k])
        parts = _sequence_references(case, piece, Cotangents(dout[:, rows_q], dlse[:, :, rows_q]))
        for results, part in zip(whole, parts, strict=True):
            results.out[:, rows_q], results.lse[:, :, rows_q] = part.out, part.lse
            results.dq[:, rows_q] = part.dq
            results.dk[:, rows_k], results.dv[:, rows_k] = part.dk, part.dv
    return whole


def _nothing(case: PackedCase, inputs: Inputs) -> Results:
    """What rows that see no key have."""
    out = torch.zeros(1, case.seqlen_q, case.heads_q, case.head_dim_v, dtype=torch.float64)
    lse = torch.full((1, case.heads_q, case.seqlen_q), -math.inf, dtype=torch.float64)
    return Results(out, lse, *(torch.zeros_like(x, dtype=torch.float64) for x in inputs))


def _sequence_references(
    case: PackedCase, inputs: Inputs, cotangents: Cotangents
) -> tuple[Results, Results, Results]:
    options: dict[str, Any] = {
        "mask": case.mask,
        "softmax_scale": case.softmax_scale,
        "softcap": case.softcap,
    }
    exact, low, terms = (
        gradients(inputs, *cotangents, **options)
        for gradients in (materialized_gradients, low_precision_gradients, gradient_terms)
    )
    want = expected(case, inputs)
    return (
        Results(want.out, want.lse, *exact),
        Results(want.low_out, want.low_lse, *low),
        Results(torch.zeros_like(want.out), want.lse, *terms),
    )


# Sequences of no, one and several tiles; no queries, no keys, and neither.
RAGGED = (
    Side((5, 130, 0, 64, 0, 1, 200), before=3, behind=7),
    Side((70, 200, 3, 0, 0, 129, 90), behind=66),
)
# Rows that do not count behind those that do: some, whole tiles of them, and all.
USED = (
    Side((140, 300, 64, 90), (140, 10, 0, 33), behind=1),
    Side((210, 300, 70, 200), (150, 128, 60, 0), before=130),
)
# The window of a row that does not count begins behind that of the last one that does.
FEW_QUERIES = (Side((400,), (10,)), Side((512,)))


def mask_cases() -> Iterator[PackedCase]:
    """Every mask, with and without a cap, on ragged sequences."""
    for fields in (
        {},
        {"causal": True},
        {"window": (60, 20)},
        {"window": (40, -1), "causal": True},
    ):
        for softcap in (0.0, 2.0):
            yield _case("ragged", RAGGED, softcap=softcap, **fields)


def used_cases() -> Iterator[PackedCase]:
    """Every mask where rows do not count, in order: no turn may be kept for a tile of such rows."""
    for fields in ({}, {"causal": True}, {"window": (60, 20)}):
        yield _case("used", USED, deterministic=True, **fields)
    yield _case("used", FEW_QUERIES, window=(400, -1))
    yield _case("used", (USED[0], Side((210, 300, 70, 200))), causal=True)
    yield _case("used", (Side((140, 300, 64, 90)), USED[1]), causal=True)


def group_cases() -> Iterator[PackedCase]:
    """Several query heads a key head."""
    for causal, (heads_q, heads_k) in ((True, (3, 1)), (False, (6, 2)), (True, (7, 1))):
        yield _case("group", RAGGED, causal=causal, heads_q=heads_q, heads_k=heads_k)


def wide_cases() -> Iterator[PackedCase]:
    """The other head dims, where tiles and operands differ."""
    for head_dims in ((96, 96), (128, 128), (192, 128), (192, 192), (256, 256)):
        yield _case("wide", USED, head_dims, causal=True)
        yield _case("wide", RAGGED, head_dims, window=(60, 20), softcap=2.0, deterministic=True)


def unequal_cases() -> Iterator[PackedCase]:
    """A V narrower than K, under query heads that share both."""
    yield _case("unequal", USED, (96, 32), causal=True, heads_q=3)


def half_cases() -> Iterator[PackedCase]:
    """The other dtype."""
    yield _case("half", RAGGED, dtype="fp16", window=(60, 20), softcap=2.0, heads_q=3)
    yield _case("half", USED, (128, 128), dtype="fp16", causal=True, heads_q=2)


def _case(
    name: str,
    sides: tuple[Side, Side],
    head_dims: tuple[int, int] = (64, 64),
    **fields: Any,
) -> PackedCase:
    side_q, side_k = sides
    return PackedCase(
        name=name,
        seqlen_q=side_q.total,
        seqlen_k=side_k.total,
        head_dim=head_dims[0],
        head_dim_v=head_dims[1],
        dlse=True,
        side_q=side_q,
        side_k=side_k,
        **fields,
    )


PACKED_CASES: tuple[PackedCase, ...] = tuple(
    chain(mask_cases(), used_cases(), group_cases(), wide_cases(), unequal_cases(), half_cases())
)


def runs_by_default(case: BackwardCase, wide: tuple[int, int]) -> bool:
    """Whether a case with a band, a cap or packed sequences runs without `-m slow`.

    A kernel takes seconds to compile, and executing it tenths of one. At head dim 64 each feature
    has a kernel, but not each pair of them: packed, caps come with a window, and a group has 7
    heads. At the head dims `wide` one kernel has all of them, in order; test_property.py draws
    problems of others.
    """
    packed = isinstance(case, PackedCase)
    if (case.head_dim, case.head_dim_v) == wide:
        return packed and case.deterministic
    if (case.head_dim, case.head_dim_v) != (64, 64):
        return False
    if not packed:
        return True
    if case.softcap and case.window == (-1, -1):
        return False
    return case.name != "group" or case.heads_q == 7
