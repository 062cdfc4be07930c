"""Whole problems at random: variants of generated code, and problems that run in one of them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

import hopperflash
from hopperflash.plan import tiles
from hopperflash.problem import GRADIENTS, MaskSpec
from tests.support.sequences import Attended, Rows, check_results, poison

# Head dims of Q with K and of V as tiles pad them; the small ones come more often.
HEAD_DIMS = (
    *[(64, 64)] * 4,
    (64, 128),
    (96, 64),
    (128, 128),
    (192, 128),
    (192, 192),
    (256, 64),
    (96, 256),
)
MASKS = ((False, False), (True, False), (False, True), (True, True))  # (causal, window)
RATIOS = (1, 2, 3, 4, 7, 8)  # query heads per key head
TILE, MAX_TILES = 128, 8  # of TILE x TILE scores, over all heads; or one for each sequence and head
MAX_LENGTH = 1000


@dataclass(frozen=True)
class Variant:
    """What decides which kernels are compiled: all problems of a variant share them."""

    dtype: torch.dtype
    head_dim: int
    head_dim_v: int
    causal: bool
    window: bool
    softcap: bool
    packed: bool
    deterministic: bool
    gradients: tuple[str, ...]
    group: int  # query heads per key head: a forward tile may hold them all


_DOCUMENTS = Variant(
    dtype=torch.bfloat16,
    head_dim=64,
    head_dim_v=64,
    causal=True,
    window=False,
    softcap=False,
    packed=True,
    deterministic=False,
    gradients=GRADIENTS,
    group=4,
)
_DENSE = replace(_DOCUMENTS, dtype=torch.float16, packed=False)
# Between them every padded head dim, dtype, layout, kind of mask and option.
STRATIFIED = (
    _DOCUMENTS,
    replace(_DENSE, head_dim=96, head_dim_v=96, causal=False, softcap=True, group=1),
    replace(
        _DOCUMENTS,
        head_dim=128,
        head_dim_v=128,
        causal=False,
        window=True,
        deterministic=True,
        group=2,
    ),
    replace(_DENSE, head_dim=192, head_dim_v=128, window=True, group=7),
    replace(
        _DOCUMENTS, head_dim=256, head_dim_v=256, softcap=True, gradients=("dk", "dv"), group=1
    ),
)


@dataclass(frozen=True)
class Drawn:
    """A problem; `lengths` are (seqlen_q, seqlen_k) of each sequence, or of each batch entry.

    `gaps` rows lie before each packed sequence and as many of a sequence's last rows do not count;
    `layouts` say how q, k, v and dout lie in memory; `magnitude` scales q and k.
    """

    variant: Variant
    lengths: tuple[tuple[int, int], ...]
    gaps: tuple[int, int, int]
    heads_k: int
    head_dim: int
    head_dim_v: int
    window: tuple[int, int]
    softcap: float
    layouts: tuple[str, str, str, str]
    uses_lse: bool
    seed: int
    magnitude: float = 1.0


def variant_of(seed: int) -> Variant:
    """The same seed gives the same variant; the first ones are `STRATIFIED`."""
    if seed < len(STRATIFIED):
        return STRATIFIED[seed]
    rng = random.Random(seed)
    head_dim, head_dim_v = rng.choice(HEAD_DIMS)
    causal, window = rng.choice(MASKS)
    return Variant(
        dtype=rng.choice([torch.bfloat16, torch.float16]),
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        causal=causal,
        window=window,
        softcap=rng.random() < 0.5,
        packed=rng.random() < 0.6,
        deterministic=rng.random() < 0.3,
        gradients=rng.choice([GRADIENTS, GRADIENTS, ("dq",), ("dk", "dv"), ("dq", "dv"), ()]),
        group=rng.choice(RATIOS),
    )


@st.composite
def problems(draw: Callable[[Any], Any], variant: Variant) -> Drawn:
    """Problems of a variant: lengths at tile edges, and 0, more often than others, and one side
    long. What hypothesis tries first is the first of each choice. There is always a sequence:
    without any, no kernel runs.
    """
    edges = st.sampled_from((129, 65, 200, 127, 1, 63, 128, 64, 0))
    short, long = st.one_of(edges, st.integers(0, 260)), st.integers(0, MAX_LENGTH)
    pairs = st.one_of(st.tuples(short, short), st.tuples(short, long), st.tuples(long, short))
    if variant.packed:
        lengths = [draw(pairs) for _ in range(draw(st.sampled_from((3, 2, 4, 1))))]
    else:
        lengths = [draw(pairs)] * draw(st.sampled_from((2, 1)))
    heads_k = draw(st.sampled_from((2, 1) if variant.group < 4 else (1,)))
    bound = st.one_of(st.integers(0, 140), st.just(-1))
    window = draw(st.tuples(bound, bound)) if variant.window else (-1, -1)
    layout = st.sampled_from(tuple(LAYOUTS))
    return Drawn(
        variant=variant,
        lengths=_shortened(lengths, heads_k * variant.group, variant.packed),
        gaps=draw(st.tuples(*[st.integers(0, 9)] * 3)) if variant.packed else (0, 0, 0),
        heads_k=heads_k,
        head_dim=draw(_head_dims(variant.head_dim)),
        head_dim_v=draw(_head_dims(variant.head_dim_v)),
        window=window,
        softcap=draw(st.sampled_from((15.0, 1.0, 50.0))) if variant.softcap else 0.0,
        layouts=draw(st.tuples(*[layout] * 4)),
        uses_lse=draw(st.booleans()),
        seed=draw(st.integers(0, 2**32 - 1)),
        magnitude=draw(st.sampled_from((1.0, 1.0, 4.9, 0.1))),
    )


def _shortened(
    lengths: list[tuple[int, int]], heads: int, packed: bool
) -> tuple[tuple[int, int], ...]:
    """Few tiles, but one for each sequence: the longer side of the largest one loses half."""
    most = max(MAX_TILES // heads, len(lengths))
    while sum(map(_tiles, lengths)) > most:
        largest = max(range(len(lengths)), key=lambda i: (_tiles(lengths[i]), sum(lengths[i])))
        seqlen_q, seqlen_k = lengths[largest]
        longer_q = seqlen_q > seqlen_k
        halved = (seqlen_q // 2, seqlen_k) if longer_q else (seqlen_q, seqlen_k // 2)
        lengths = [halved if not packed or i == largest else x for i, x in enumerate(lengths)]
    return tuple(lengths)


def _head_dims(padded: int) -> Any:
    """Those that a tile of `padded` columns is for."""
    sizes = [size for size in range(8, 257, 8) if tiles.padded_head_dim(size) == padded]
    return st.sampled_from(sizes)


def _tiles(lengths: tuple[int, int]) -> int:
    return math.prod(-(-size // TILE) for size in lengths)


def _surrounded(x: Tensor) -> Tensor:
    larger = x.new_full((x.shape[0] + 3, x.shape[1] + 1, x.shape[2] + 16), torch.nan)
    return larger[1:-2, :-1, 8:-8].copy_(x)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {  # of (rows, heads, head_dim)
    "contiguous": lambda x: x,
    "heads first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "head_dim not last": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "NaN around": _surrounded,
    "odd address": lambda x: x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x),
    "every other row": lambda x: torch.repeat_interleave(x, 2, dim=0)[::2],
    "negated": lambda x: torch._neg_view(-x),
}


def check(drawn: Drawn, arch: str) -> None:
    """Computes a problem through the public functions and compares with fp64."""
    variant = drawn.variant
    gradients = variant.gradients
    lengths, rows, totals = _packing(drawn)
    operands = _operands(drawn, rows, totals)
    views = {
        name: LAYOUTS[layout](operands[name].detach()).requires_grad_(f"d{name}" in gradients)
        for name, layout in zip(("q", "k", "v", "dout"), drawn.layouts, strict=True)
    }
    with nullcontext() if arch == "cpu" else hopperflash.emulate(arch, schedule="random") as run:
        found = _computed(drawn, views, operands["dlse"], lengths, gradients)
    assert run is None or run.hazards == []
    if not drawn.uses_lse:
        operands.pop("dlse")
    scale = drawn.head_dim**-0.5
    attended = Attended(MaskSpec.canonical(variant.causal, drawn.window), scale, drawn.softcap)
    check_results(attended, operands, rows, found)


def _packing(drawn: Drawn) -> tuple[dict[str, Tensor], list[Rows], tuple[int, int]]:
    """The lengths of packed sequences, where they lie, and how many rows there are."""
    before, unused, behind = drawn.gaps
    rows, offsets, end_q, end_k = [], [], before, before
    for seqlen_q, seqlen_k in drawn.lengths:
        offsets.append((end_q, end_k))
        rows.append(Rows(range(end_q, end_q + seqlen_q), range(end_k, end_k + seqlen_k)))
        end_q, end_k = end_q + seqlen_q + unused, end_k + seqlen_k + unused
    offsets.append((end_q, end_k))
    lengths = {
        f"cu_seqlens_{side}": torch.tensor([pair[i] for pair in offsets], dtype=torch.int32)
        for i, side in enumerate("qk")
    }
    if unused:
        lengths |= {
            f"seqused_{side}": torch.tensor([p[i] for p in drawn.lengths], dtype=torch.int32)
            for i, side in enumerate("qk")
        }
    return lengths, rows, (end_q + behind, end_k + behind)


def _operands(drawn: Drawn, rows: list[Rows], totals: tuple[int, int]) -> dict[str, Tensor]:
    """(rows, heads, head_dim) of each, normal; poison in rows that do not count."""
    generator = torch.Generator().manual_seed(drawn.seed)
    heads_q, dtype = drawn.heads_k * drawn.variant.group, drawn.variant.dtype
    shapes = {
        "q": (totals[0], heads_q, drawn.head_dim),
        "k": (totals[1], drawn.heads_k, drawn.head_dim),
        "v": (totals[1], drawn.heads_k, drawn.head_dim_v),
        "dout": (totals[0], heads_q, drawn.head_dim_v),
    }
    normal = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    scaled = {n: x * drawn.magnitude if n in ("q", "k") else x for n, x in normal.items()}
    operands = {name: x.to(dtype) for name, x in scaled.items()}
    for name, operand in operands.items():
        counts = torch.zeros(len(operand), dtype=torch.bool)
        for sequence in rows:
            taken = sequence.k if name in "kv" else sequence.q
            counts[taken.start : taken.stop] = True
        poison(operand, ~counts)
    return {**operands, "dlse": torch.randn((heads_q, totals[0]), generator=generator)}


def _computed(
    drawn: Drawn,
    views: dict[str, Tensor],
    dlse: Tensor,
    lengths: dict[str, Tensor],
    gradients: tuple[str, ...],
) -> dict[str, Tensor]:
    """Results by name, of packed rows."""
    variant = drawn.variant
    options: dict[str, Any] = {
        "causal": variant.causal,
        "window_size": drawn.window,
        "softcap": drawn.softcap,
        "deterministic": variant.deterministic,
        "return_lse": True,
    }
    q, k, v, dout = views.values()
    if variant.packed:
        cu_seqlens = {n: x.long() if drawn.uses_lse else x for n, x in lengths.items()}
        out, lse = hopperflash.flash_attn_varlen_func(
            q, k, v, max_seqlen_q=MAX_LENGTH, max_seqlen_k=MAX_LENGTH, **cu_seqlens, **options
        )
    else:
        batch = len(drawn.lengths)
        dense = [_as_batch(x, batch) for x in (q, k, v)]
        out, lse = hopperflash.flash_attn_func(*dense, **options)
        out, lse = _as_rows(out), lse.transpose(0, 1).flatten(1)
    results = {"out": out, "lse": lse}
    inputs = [views[name[1:]] for name in gradients]
    if inputs:
        outputs, incoming = ((out, lse), (dout, dlse)) if drawn.uses_lse else ((out,), (dout,))
        found = torch.autograd.grad(outputs, inputs, incoming)
        results |= dict(zip(gradients, found, strict=True))
    return {name: result.detach() for name, result in results.items()}


def _as_batch(x: Tensor, batch: int) -> Tensor:
    """(batch * seqlen, heads, head_dim) to (batch, seqlen, heads, head_dim), as a view."""
    return x.unflatten(0, (batch, -1))


def _as_rows(x: Tensor) -> Tensor:
    return x.flatten(0, 1)
