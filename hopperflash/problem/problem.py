"""An attention problem as plain data, and the part of it that changes generated code."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Literal

from hopperflash.problem.dtypes import DType
from hopperflash.problem.mask import MaskKind, MaskSpec

Direction = Literal["forward", "backward"]
GRADIENTS = ("dq", "dk", "dv")


@dataclass(frozen=True)
class OperandFacts:
    """What is known of one tensor without touching its values.

    `shape` and `strides` count elements; `alignment` is the largest power of two, in bytes and up
    to 16, that divides the base address.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    alignment: int
    dtype: str
    device: str

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.strides):
            raise ValueError(f"shape {self.shape} and strides {self.strides} differ in rank")


@dataclass(frozen=True)
class Signature:
    """The facts of a problem that change generated code; padded head dims are in the config."""

    dtype: DType
    mask_kind: MaskKind
    softcap: bool = False
    packed: bool = False


@dataclass(frozen=True)
class AttnProblem:
    """A checked attention problem; `build_problem` is how to get one.

    Q is `(batch, seqlen_q, heads_q, head_dim)`, K `(batch, seqlen_k, heads_k, head_dim)`, V
    `(batch, seqlen_k, heads_k, head_dim_v)`. `operands` holds the facts of each by name. `alibi`
    and `return_attn_probs` are only asked for: a backend honours or refuses them. `gradients` are
    those that a backward has to compute; `backward_problem` narrows them. `sm_margin` streaming
    multiprocessors are left to other kernels.

    Packed sequences are one batch entry whose rows are all of theirs, and `sequences` is their
    number; their lengths are values of the operands "cu_seqlens_q", "cu_seqlens_k" and, where
    given, "seqused_q" and "seqused_k", which nothing here looks at.
    """

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_k: int
    head_dim: int
    head_dim_v: int
    dtype: DType
    mask: MaskSpec
    softmax_scale: float
    operands: tuple[tuple[str, OperandFacts], ...]
    device: str
    softcap: float = 0.0
    dropout_p: float = 0.0
    alibi: bool = False
    deterministic: bool = False
    return_attn_probs: bool = False
    gradients: tuple[str, ...] = GRADIENTS
    sm_margin: int = 0
    sequences: int | None = None

    def __hash__(self) -> int:
        """Computed once: a plan is looked up by its problem in every call."""
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, field.name) for field in fields(self)))

    def __getstate__(self) -> dict[str, Any]:
        """Without the hash: strings have another one in another process."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def is_packed(self) -> bool:
        """Whether sequences of their own lengths lie one behind the other."""
        return self.sequences is not None

    @property
    def is_causal(self) -> bool:
        """Whether the mask is the diagonal alone."""
        return self.mask.kind is MaskKind.CAUSAL

    @property
    def signature(self) -> Signature:
        """What a compiled kernel depends on: lengths, strides and bounds are run-time values."""
        return Signature(self.dtype, self.mask.kind, self.softcap > 0.0, self.is_packed)

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.heads_q // self.heads_k

    @property
    def is_empty(self) -> bool:
        """No query sees any key, so that nothing needs a launch."""
        return 0 in (self.batch, self.seqlen_q, self.seqlen_k, self.sequences)

    @property
    def visible_pairs(self) -> int:
        """(query, key) pairs of one head of one batch entry; ValueError for packed sequences, whose
        lengths are not known here."""
        if self.is_packed:
            raise ValueError("the lengths of packed sequences are values of tensors")
        return self.mask.visible_pairs(self.seqlen_q, self.seqlen_k)

    def useful_flops(self, direction: Direction) -> int:
        """Multiply-adds counted twice, over visible pairs only: 2 GEMMs forward, 5 backward."""
        d, dv = self.head_dim, self.head_dim_v
        per_pair = 2 * (d + dv) if direction == "forward" else 2 * (3 * d + 2 * dv)
        return self.batch * self.heads_q * self.visible_pairs * per_pair
