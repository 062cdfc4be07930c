"""Named backward cases, small enough for the emulator, and how to check gradients on one.

Compiling costs more than executing, so the cases share the kernels that `KERNELS` lists.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, cycle, product
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from hopperflash.reference import (
    Gradients,
    gradient_terms,
    hidden_pairs,
    low_precision_gradients,
    materialized_gradients,
)
from tests.support.cases import Attention, Case, Inputs, make_inputs
from tests.support.tolerance import assert_close

DTypeName = Literal["bf16", "fp16"]

# (dtype, causal, head dims of Q with K and of V, which all run in the same compiled kernel)
KERNELS: tuple[tuple[DTypeName, bool, tuple[tuple[int, int], ...]], ...] = (
    ("bf16", True, ((8, 8), (40, 40), (64, 64))),
    ("bf16", False, ((8, 8), (40, 40), (64, 64))),
    ("fp16", True, ((8, 8), (40, 40), (64, 64))),
    ("fp16", False, ((8, 8), (40, 40), (64, 64))),
    ("bf16", True, ((72, 72), (96, 96))),
    ("fp16", False, ((72, 72), (96, 96))),
    ("bf16", True, ((104, 104), (128, 128))),
    ("bf16", False, ((104, 104), (128, 128))),
    ("fp16", False, ((104, 104), (128, 128))),
    ("fp16", True, ((136, 136), (192, 192))),
    ("bf16", False, ((136, 136), (192, 192))),
    ("bf16", True, ((200, 200), (256, 256))),
    ("fp16", False, ((200, 200), (256, 256))),
    ("bf16", True, ((192, 128), (136, 104))),
    ("fp16", False, ((192, 128),)),
    ("bf16", False, ((64, 128),)),
    ("fp16", True, ((64, 128),)),
    ("fp16", True, ((96, 40),)),
)
LENGTHS = (
    (128, 128),
    (129, 1),
    (1, 129),
    (63, 200),
    (200, 63),
    (17, 127),
    (127, 17),
    (333, 129),
    (129, 333),
    (64, 64),
    (200, 333),
)  # (seqlen_q, seqlen_k)


class Cotangents(NamedTuple):
    """What the backward starts from; no `dlse` where nothing uses the LSE."""

    dout: Tensor  # (batch, seqlen_q, heads_q, head_dim_v)
    dlse: Tensor | None  # (batch, heads_q, seqlen_q) fp32


class ExpectedGradients(NamedTuple):
    """Of the fp64 reference and of the formula in the input dtype, and the sums of magnitudes."""

    reference: Gradients
    low: Gradients
    terms: Gradients


@dataclass(frozen=True)
class BackwardCase(Case):
    """A dense attention problem and what its backward is asked for."""

    dlse: bool = False
    deterministic: bool = False

    def __str__(self) -> str:
        asked = ("dlse", self.dlse), ("deterministic", self.deterministic)
        return "-".join([super().__str__(), *(name for name, wanted in asked if wanted)])

    @property
    def options(self) -> dict[str, Any]:
        return {**super().options, "deterministic": self.deterministic}


def make_cotangents(case: BackwardCase, seed: int = 0) -> Cotangents:
    """Standard normal, also where no key is seen; the same seed gives the same in every process."""
    generator = torch.Generator().manual_seed(seed + 1)
    rows = (case.batch, case.seqlen_q, case.heads_q)
    dout = torch.randn((*rows, case.head_dim_v), generator=generator)
    dlse = torch.randn((case.batch, case.heads_q, case.seqlen_q), generator=generator)
    return Cotangents(dout.to(case.torch_dtype), dlse if case.dlse else None)


def gradients_of(
    case: BackwardCase, attention: Attention, inputs: Inputs, cotangents: Cotangents
) -> Gradients:
    """All gradients, through `attention` and autograd."""
    operands = tuple(x.detach().requires_grad_() for x in inputs)
    out, lse = attention(*operands, **case.options)
    results, incoming = (out,), (cotangents.dout,)
    if cotangents.dlse is not None:
        results, incoming = (out, lse), (cotangents.dout, cotangents.dlse)
    return Gradients(*torch.autograd.grad(results, operands, incoming))


def check_backward(case: BackwardCase, attention: Attention, *, seed: int = 0) -> None:
    """Calls `attention` and its backward; accepts the gradients by the tolerance rule."""
    found = gradients_of(case, attention, make_inputs(case, seed), make_cotangents(case, seed))
    _compare(case, found._asdict(), _expected_of_seed(case, seed))


def check_gradients(
    case: BackwardCase, found: Mapping[str, Tensor], inputs: Inputs, cotangents: Cotangents
) -> None:
    """The gradients that were found against fp64."""
    _compare(case, found, expected_gradients(case, inputs, cotangents))


def expected_gradients(
    case: BackwardCase, inputs: Inputs, cotangents: Cotangents
) -> ExpectedGradients:
    """What the gradients of a case's problem are compared with."""
    options: dict[str, Any] = {
        "mask": case.mask,
        "softmax_scale": case.softmax_scale,
        "softcap": case.softcap,
    }
    return ExpectedGradients(
        materialized_gradients(inputs, *cotangents, **options),
        low_precision_gradients(inputs, *cotangents, **options),
        gradient_terms(inputs, *cotangents, **options),
    )


@lru_cache(maxsize=2)
def _expected_of_seed(case: BackwardCase, seed: int) -> ExpectedGradients:
    """Kept for the other schedules and mutants of a kernel that a case is checked with."""
    return expected_gradients(case, make_inputs(case, seed), make_cotangents(case, seed))


def _compare(case: BackwardCase, found: Mapping[str, Tensor], expected: ExpectedGradients) -> None:
    """By the tolerance rule, and exact zeros where nothing depends on an operand."""
    factor = 3.0 if case.softcap else 2.0
    hidden = hidden_pairs(case.mask, case.seqlen_q, case.seqlen_k)
    unused = {"dq": hidden.all(1), "dk": hidden.all(0), "dv": hidden.all(0)}
    for name, gradient in found.items():
        reference, yardstick, magnitudes = (getattr(x, name) for x in expected)
        assert gradient.dtype == case.torch_dtype, f"{name} is {gradient.dtype}"
        assert_close(gradient, reference, yardstick, factor=factor, terms=magnitudes, name=name)
        assert not gradient[:, unused[name]].any(), f"{name} is not 0 where nothing is seen"


def head_dim_cases() -> Iterator[BackwardCase]:
    """Every kernel at every head dim, at two of the lengths around tile edges."""
    lengths, dlse = cycle(LENGTHS), cycle((True, False, False))
    for dtype, causal, head_dims in KERNELS:
        for pair, _ in product(head_dims, range(2)):
            fields: dict[str, Any] = {"dtype": dtype, "causal": causal, "dlse": next(dlse)}
            yield _case("head_dim", next(lengths), pair, **fields)


def length_cases() -> Iterator[BackwardCase]:
    """Lengths at, below and above tile edges, with equal and unequal numbers of tiles."""
    for seqlen in (1, 17, 63, 127, 129, 200, 333):
        yield _case("length", (seqlen, seqlen), causal=True, dlse=seqlen % 2 == 0)
    for lengths in ((1, 333), (333, 1), (17, 200), (257, 129)):
        yield _case("cross", lengths, dtype="fp16", causal=False)
    yield _case("long", (129, 1000), (128, 128), causal=True, dlse=True)


def keyless_cases() -> Iterator[BackwardCase]:
    """Causal with more queries than keys: whole tiles of rows, and a part of one, see no key."""
    for lengths, pair in (((333, 17), (64, 64)), ((200, 63), (128, 128)), ((129, 1), (256, 256))):
        yield _case("keyless", lengths, pair, causal=True, dlse=True)


def group_cases() -> Iterator[BackwardCase]:
    """Query heads per key head, with one key head and with two, where P stays in registers and
    where it does not."""
    for heads_q, heads_k in ((2, 2), (3, 1), (4, 1), (6, 2), (7, 1), (8, 1), (8, 2)):
        heads = {"heads_q": heads_q, "heads_k": heads_k}
        yield _case("group", (65, 129), causal=True, dlse=heads_q % 2 == 1, **heads)
    for causal, pair in ((False, (128, 128)), (True, (256, 256)), (True, (192, 128))):
        yield _case("group", (129, 70), pair, causal=causal, heads_q=6, heads_k=2)


def unequal_cases() -> Iterator[BackwardCase]:
    """Head dims of K and V that differ either way, under query heads that share both."""
    kernels: tuple[tuple[DTypeName, tuple[int, int], tuple[int, int]], ...] = (
        ("bf16", (128, 64), (4, 2)),
        ("fp16", (96, 32), (3, 1)),
        ("fp16", (64, 128), (4, 1)),
    )
    for dtype, pair, (heads_q, heads_k) in kernels:
        fields: dict[str, Any] = {"dtype": dtype, "heads_q": heads_q, "heads_k": heads_k}
        yield _case("unequal", (129, 70), pair, causal=True, **fields)


def batch_cases() -> Iterator[BackwardCase]:
    for causal in (False, True):
        yield _case("batch", (127, 65), batch=2, heads_q=2, heads_k=2, causal=causal, dlse=causal)


def magnitude_cases() -> Iterator[BackwardCase]:
    """Scores up to about +-120, and all near -120 with the LSE there as well."""
    dtypes: tuple[DTypeName, ...] = ("bf16", "fp16")
    for dtype in dtypes:
        fields: dict[str, Any] = {"dtype": dtype, "causal": True, "dlse": True}
        yield _case("magnitude", (129, 200), magnitude=4.9, **fields)
        yield _case("magnitude", (129, 200), magnitude=3.87, fill="opposed", **fields)
        yield _case("magnitude", (129, 200), magnitude=0.1, **fields)
    # Keys past the end, with scores of 0, lie behind no diagonal here.
    yield _case("magnitude", (129, 200), magnitude=3.87, fill="opposed")


def constant_cases() -> Iterator[BackwardCase]:
    """Equal values: dP is the same for every key, and dQ and dK cancel to 0."""
    yield _case("constant", (129, 129), causal=True, fill="constant")
    yield _case("constant", (129, 129), dtype="fp16", causal=False, fill="constant", dlse=True)


def _case(
    name: str, lengths: tuple[int, int], head_dims: tuple[int, int] = (64, 64), **fields: Any
) -> BackwardCase:
    seqlen_q, seqlen_k = lengths
    head_dim, head_dim_v = head_dims
    return BackwardCase(
        name=name,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        **fields,
    )


BACKWARD_CASES: tuple[BackwardCase, ...] = tuple(
    chain(
        head_dim_cases(),
        length_cases(),
        keyless_cases(),
        group_cases(),
        unequal_cases(),
        batch_cases(),
        magnitude_cases(),
        constant_cases(),
    )
)
