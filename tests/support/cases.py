"""Named forward cases, small enough for the emulator, and how to check a function on one.

Every generator stands for one feature; `FORWARD_CASES` feeds the emulated and the GPU tests.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, cycle, product
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from hopperflash.problem.mask import MaskSpec
from hopperflash.reference import low_precision_attention, materialized_attention
from tests.support.tolerance import assert_close

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
HEAD_DIMS = (8, 16, 24, 40, 64, 72, 80, 96, 104, 112, 128, 136, 160, 192, 200, 256)
LENGTHS = (
    (128, 128),
    (1, 129),
    (129, 1),
    (63, 193),
    (65, 64),
    (177, 127),
    (64, 257),
    (191, 65),
    (127, 191),
    (257, 63),
    (193, 177),
)  # (seqlen_q, seqlen_k)
CONSTANT = 0.3  # inexact in both dtypes, so that the scores round as well


class Inputs(NamedTuple):
    q: Tensor  # (batch, seqlen_q, heads_q, head_dim)
    k: Tensor  # (batch, seqlen_k, heads_k, head_dim)
    v: Tensor  # (batch, seqlen_k, heads_k, head_dim_v)


class Expected(NamedTuple):
    """Results of the fp64 reference and of the formula in the input dtype."""

    out: Tensor
    lse: Tensor
    low_out: Tensor
    low_lse: Tensor


class Attention(Protocol):
    """`hopperflash.flash_attn_func` with `return_lse=True`, or anything that is called alike."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, /, **options: Any
    ) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True)
class Case:
    """One dense attention problem; `magnitude` scales q and k, so the scores by its square.

    Operands are standard normal; all 0.3 ("constant"); or q near 1 and k near -1, so that every
    score is negative and so is the LSE ("opposed").
    """

    name: str
    dtype: Literal["bf16", "fp16"] = "bf16"
    batch: int = 1
    seqlen_q: int = 128
    seqlen_k: int = 128
    heads_q: int = 1
    heads_k: int = 1
    head_dim: int = 64
    head_dim_v: int = 64
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    magnitude: float = 1.0
    fill: Literal["normal", "constant", "opposed"] = "normal"

    def __str__(self) -> str:
        parts = [self.name, self.dtype, f"d{self.head_dim}"]
        if self.head_dim_v != self.head_dim:
            parts[-1] += f"v{self.head_dim_v}"
        parts.append(f"{self.seqlen_q}x{self.seqlen_k}")
        if (self.heads_q, self.heads_k) != (1, 1):
            parts.append(f"h{self.heads_q}k{self.heads_k}")
        if self.batch != 1:
            parts.append(f"b{self.batch}")
        parts.append("causal" if self.causal else "full")
        if self.window != (-1, -1):
            parts.append("window{}_{}".format(*self.window))
        if self.softcap:
            parts.append(f"cap{self.softcap:g}")
        if self.magnitude != 1.0:
            parts.append(f"x{self.magnitude:g}")
        return "-".join(parts)

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def mask(self) -> MaskSpec:
        return MaskSpec.canonical(self.causal, self.window)

    @property
    def softmax_scale(self) -> float:
        return 1.0 / math.sqrt(self.head_dim)

    @property
    def tiles(self) -> int:
        """128 x 128 score tiles that a kernel visits at most: what emulation costs."""
        per_head = math.ceil(self.seqlen_q / 128) * math.ceil(self.seqlen_k / 128)
        return self.batch * self.heads_q * per_head

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of `hopperflash.flash_attn_func`."""
        return {
            "softmax_scale": self.softmax_scale,
            "causal": self.causal,
            "window_size": self.window,
            "softcap": self.softcap,
            "return_lse": True,
        }


def make_inputs(case: Case, seed: int = 0) -> Inputs:
    """Contiguous CPU tensors; the same seed gives the same values in every process."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (
        (case.batch, case.seqlen_q, case.heads_q, case.head_dim),
        (case.batch, case.seqlen_k, case.heads_k, case.head_dim),
        (case.batch, case.seqlen_k, case.heads_k, case.head_dim_v),
    )
    if case.fill == "constant":
        q, k, v = (torch.full(shape, CONSTANT) for shape in shapes)
    else:
        q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    if case.fill == "opposed":
        q, k = 1 + q / 8, k / 8 - 1
    scaled = (q * case.magnitude, k * case.magnitude, v)
    return Inputs(*(x.to(case.torch_dtype) for x in scaled))


def expected(case: Case, inputs: Inputs) -> Expected:
    options: dict[str, Any] = {"softmax_scale": case.softmax_scale, "softcap": case.softcap}
    reference = materialized_attention(*inputs, case.mask, **options)
    return Expected(*reference, *low_precision_attention(*inputs, case.mask, **options))


@lru_cache(maxsize=2)
def _expected_of_seed(case: Case, seed: int) -> Expected:
    """Kept for the other schedules and mutants of a kernel that a case is checked with."""
    return expected(case, make_inputs(case, seed))


def check_forward(case: Case, attention: Attention, *, seed: int = 0) -> None:
    """Calls `attention` on the case's inputs and accepts its results by the tolerance rule."""
    out, lse = attention(*make_inputs(case, seed), **case.options)
    want = _expected_of_seed(case, seed)
    assert out.dtype == case.torch_dtype, f"out is {out.dtype}, inputs are {case.torch_dtype}"
    assert lse.dtype == torch.float32, f"lse is {lse.dtype}, not float32"
    factor = 3.0 if case.softcap else 2.0
    assert_close(out, want.out, want.low_out, factor=factor, name="out")
    assert_close(lse, want.lse, want.low_lse, factor=factor, terms=want.lse, name="lse")


def head_dim_cases() -> Iterator[Case]:
    """Every head dim in both dtypes and masks, each at one of the lengths around tile edges."""
    # As many lengths as share no factor with 4: each meets every dtype and mask.
    lengths = cycle(LENGTHS)
    for head_dim, dtype, causal in product(HEAD_DIMS, DTYPES, (False, True)):
        yield _case("head_dim", next(lengths), head_dim, dtype=dtype, causal=causal)


def length_cases() -> Iterator[Case]:
    """Lengths at, below and above tile edges; causal with sq > sk leaves rows without keys."""
    for seqlen in (1, 63, 64, 65, 127, 129, 191, 257, 333):
        yield _case("length", (seqlen, seqlen), causal=True)
    for lengths in ((1, 333), (64, 333), (333, 64), (257, 129), (333, 1)):
        for causal in (False, True):
            yield _case("cross", lengths, dtype="fp16", causal=causal)
    yield _case("long", (129, 1000), causal=True)
    yield _case("long", (65, 1000), head_dim=128, dtype="fp16")


def group_cases() -> Iterator[Case]:
    """Query heads per key head: 1, 2, 3, 4, 7 and 8, with one key head (MQA) and with two."""
    for heads_q, heads_k in ((2, 2), (2, 1), (4, 2), (3, 1), (4, 1), (7, 1), (8, 1)):
        yield _case("group", (65, 127), heads_q=heads_q, heads_k=heads_k, causal=True)


def unequal_cases() -> Iterator[Case]:
    """A V narrower than K, under query heads that share both."""
    heads: dict[str, Any] = {"heads_q": 4, "heads_k": 2}
    yield Case("unequal", seqlen_q=65, head_dim=128, head_dim_v=64, causal=True, **heads)


def batch_cases() -> Iterator[Case]:
    for batch, causal in product((2, 3), (False, True)):
        yield _case("batch", (127, 65), batch=batch, heads_q=2, heads_k=2, causal=causal)


def magnitude_cases() -> Iterator[Case]:
    """Scores up to about +-120, where exp overflows without the row maximum, and all near 0."""
    for dtype, magnitude in product(DTYPES, (4.9, 0.1)):
        yield _case("magnitude", (129, 193), dtype=dtype, causal=True, magnitude=magnitude)


def constant_cases() -> Iterator[Case]:
    """Equal scores: the output is V's constant and the LSE grows with the visible keys."""
    for dtype, causal in product(DTYPES, (False, True)):
        yield _case("constant", (129, 129), 80, dtype=dtype, causal=causal, fill="constant")


def _case(name: str, lengths: tuple[int, int], head_dim: int = 64, **fields: Any) -> Case:
    seqlen_q, seqlen_k = lengths
    return Case(
        name=name,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        head_dim=head_dim,
        head_dim_v=head_dim,
        **fields,
    )


FORWARD_CASES: tuple[Case, ...] = tuple(
    chain(
        head_dim_cases(),
        length_cases(),
        group_cases(),
        unequal_cases(),
        batch_cases(),
        magnitude_cases(),
        constant_cases(),
    )
)
