"""Problems without tensors: facts of contiguous operands and what `build_problem` makes of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from hopperflash.problem import (
    GRADIENTS,
    AttnOptions,
    AttnProblem,
    OperandFacts,
    backward_problem,
    build_problem,
)


def facts(
    *shape: int,
    strides: tuple[int, ...] | None = None,
    dtype: str = "bfloat16",
    device: str = "cpu",
    alignment: int = 16,
) -> OperandFacts:
    """Facts of a tensor, contiguous unless `strides` says otherwise."""
    contiguous = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    return OperandFacts(shape, strides or contiguous, alignment, dtype, device)


@dataclass(frozen=True)
class Sizes:
    """Sizes of a dense problem; `head_dim_v` follows `head_dim` where it is None."""

    batch: int = 2
    seqlen_q: int = 200
    seqlen_k: int = 300
    heads_q: int = 4
    heads_k: int = 2
    head_dim: int = 64
    head_dim_v: int | None = None


def problem(
    sizes: Sizes | None = None, options: AttnOptions | None = None, *, device: str = "cpu"
) -> AttnProblem:
    """A valid bf16 problem of contiguous operands."""
    s = sizes or Sizes()
    head_dim_v = s.head_dim if s.head_dim_v is None else s.head_dim_v
    return build_problem(
        facts(s.batch, s.seqlen_q, s.heads_q, s.head_dim, device=device),
        facts(s.batch, s.seqlen_k, s.heads_k, s.head_dim, device=device),
        facts(s.batch, s.seqlen_k, s.heads_k, head_dim_v, device=device),
        options,
    )


def packed_problem(
    total_q: int,
    total_k: int,
    sequences: int,
    options: AttnOptions | None = None,
    *,
    seqused: bool = False,
    device: str = "cpu",
) -> AttnProblem:
    """A valid bf16 problem of packed sequences: 4 query heads over 2, head_dim 64."""
    lengths = {f"cu_seqlens_{side}": (sequences + 1,) for side in "qk"}
    if seqused:
        lengths |= {f"seqused_{side}": (sequences,) for side in "qk"}
    return build_problem(
        facts(total_q, 4, 64, device=device),
        facts(total_k, 2, 64, device=device),
        facts(total_k, 2, 64, device=device),
        options,
        {name: facts(*shape, dtype="int32", device=device) for name, shape in lengths.items()},
    )


def backward(
    given: AttnProblem, gradients: tuple[str, ...] = GRADIENTS, dout: OperandFacts | None = None
) -> AttnProblem:
    """The backward of `given`, with a contiguous dO unless `dout` says otherwise."""
    shape = (given.batch, given.seqlen_q, given.heads_q, given.head_dim_v)
    dout = dout or facts(*shape, dtype=given.dtype.value, device=given.device)
    return backward_problem(given, [("dout", dout)], gradients)


def with_operand(given: AttnProblem, name: str, operand: OperandFacts) -> AttnProblem:
    """`given` with other facts for one operand."""
    operands = tuple((key, operand if key == name else old) for key, old in given.operands)
    return replace(given, operands=operands)
