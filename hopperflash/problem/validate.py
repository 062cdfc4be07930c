"""Tensor facts and options to an `AttnProblem`, or one error that lists every reason."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from numbers import Real
from typing import Any

from hopperflash.errors import InvalidArgument
from hopperflash.problem.dtypes import DType
from hopperflash.problem.lengths import packed_lengths
from hopperflash.problem.mask import MaskSpec
from hopperflash.problem.problem import GRADIENTS, AttnProblem, Direction, OperandFacts
from hopperflash.problem.results import misfits, overlap

HEADLINE = "these arguments do not make an attention problem:"
HEAD_DIM_STEP = 8
HEAD_DIM_MAX = 256
FP32_MAX = (2.0 - 2.0**-23) * 2.0**127
FP32_TINY = 2.0**-126


@dataclass(frozen=True)
class AttnOptions:
    """The options of the public functions as the caller gave them; `alibi` is their presence."""

    dropout_p: float = 0.0
    softmax_scale: float | None = None
    causal: bool = False
    window_size: Any = (-1, -1)
    softcap: float = 0.0
    alibi: bool = False
    deterministic: bool = False
    return_attn_probs: bool = False
    sm_margin: int = 0

    @property
    def is_plain(self) -> bool:
        """Whether every option is of its own type, so that equal options are the same."""
        return (
            isinstance(self.dropout_p, float)
            and (self.softmax_scale is None or isinstance(self.softmax_scale, float))
            and isinstance(self.softcap, float)
            and isinstance(self.causal, bool)
            and isinstance(self.alibi, bool)
            and isinstance(self.deterministic, bool)
            and isinstance(self.return_attn_probs, bool)
            and isinstance(self.sm_margin, int)
            and not isinstance(self.sm_margin, bool)
            and isinstance(self.window_size, tuple)
            and len(self.window_size) == 2
            and all(bound is None or isinstance(bound, int) for bound in self.window_size)
        )

    @property
    def in_own_types(self) -> AttnOptions:
        """The same options, a plain number or list of another type made one of its own type: 0 is
        0.0 or False."""
        scale, window = self.softmax_scale, self.window_size
        return AttnOptions(
            dropout_p=_as_float(self.dropout_p),
            softmax_scale=None if scale is None else _as_float(scale),
            causal=_as_bool(self.causal),
            window_size=tuple(window) if isinstance(window, list) else window,
            softcap=_as_float(self.softcap),
            alibi=self.alibi,
            deterministic=_as_bool(self.deterministic),
            return_attn_probs=_as_bool(self.return_attn_probs),
            sm_margin=self.sm_margin,
        )


def build_problem(
    q: OperandFacts,
    k: OperandFacts,
    v: OperandFacts,
    options: AttnOptions | None = None,
    lengths: Mapping[str, OperandFacts] | None = None,
) -> AttnProblem:
    """The problem of Q, K, V; raises `InvalidArgument` with every reason found.

    Dense operands are `(batch, seqlen, heads, head_dim)`. With `lengths` ("cu_seqlens_q",
    "cu_seqlens_k", and "seqused_q" and "seqused_k" where given) they are packed sequences
    `(total, heads, head_dim)`, and become a batch of one.
    """
    options = options or AttnOptions()
    packed = lengths is not None
    operands = (("q", q), ("k", k), ("v", v))
    reasons = _rank_reasons(operands, packed)
    if packed:
        q, k, v = (_as_batch(facts) for facts in (q, k, v))
        operands = (("q", q), ("k", k), ("v", v))
    sequences, length_reasons = packed_lengths(lengths or {}, q.device) if packed else (None, [])
    reasons += [
        *length_reasons,
        *_shape_reasons(q, k, v),
        *_dtype_reasons(operands),
        *_device_reasons(operands),
        *option_reasons(options),
    ]
    dtype = DType.of(q.dtype)
    if reasons or dtype is None:
        raise InvalidArgument(HEADLINE, reasons)

    batch, seqlen_q, heads_q, head_dim = q.shape
    scale = options.softmax_scale
    return AttnProblem(
        batch=batch,
        seqlen_q=seqlen_q,
        seqlen_k=k.shape[1],
        heads_q=heads_q,
        heads_k=k.shape[2],
        head_dim=head_dim,
        head_dim_v=v.shape[3],
        dtype=dtype,
        mask=MaskSpec.canonical(bool(options.causal), options.window_size),
        softmax_scale=head_dim**-0.5 if scale is None else float(scale),
        operands=(*operands, *(lengths or {}).items()),
        device=q.device,
        softcap=float(options.softcap),
        dropout_p=float(options.dropout_p),
        alibi=options.alibi,
        deterministic=options.deterministic,
        return_attn_probs=options.return_attn_probs,
        sm_margin=options.sm_margin,
        sequences=sequences,
    )


def build_call(
    operands: Mapping[str, OperandFacts],
    options: AttnOptions,
    lengths: Mapping[str, OperandFacts] | None,
    direction: Direction,
    gradients: Iterable[str] = GRADIENTS,
) -> AttnProblem:
    """`build_problem` of "q", "k" and "v", with what `operands` holds beside them: that as a batch
    of one where they are packed.

    It is looked at as well where only options are wrong, since what is expected of it follows from
    Q, K and V alone. Raises `InvalidArgument` with every reason found.
    """
    q, k, v = (operands[name] for name in ("q", "k", "v"))
    beside = {name: facts for name, facts in operands.items() if name not in ("q", "k", "v")}
    try:
        problem = build_problem(q, k, v, options, lengths)
    except InvalidArgument as refused:
        try:
            problem = build_problem(q, k, v, None, lengths)
        except InvalidArgument:
            raise refused from None
        more = _reasons_beside(problem, beside, direction)
        raise InvalidArgument(refused.headline, [*refused.reasons, *more]) from None
    if direction == "backward":
        return backward_problem(problem, beside.items(), gradients)
    return with_result(problem, "out", beside["out"]) if "out" in beside else problem


def _reasons_beside(
    problem: AttnProblem, beside: Mapping[str, OperandFacts], direction: Direction
) -> list[str]:
    """What does not fit a problem of what stands beside Q, K and V."""
    written = GRADIENTS if direction == "backward" else ("out",)
    reasons: list[str] = []
    for name, facts in beside.items():
        reasons += misfits(problem, name, facts)
        if name in written:
            reasons += overlap(name, facts)
    return reasons


def with_result(problem: AttnProblem, name: str, facts: OperandFacts) -> AttnProblem:
    """`problem` with memory to write a result to; `InvalidArgument` where it cannot hold it."""
    reasons = _reasons_beside(problem, {name: facts}, "forward")
    if reasons:
        raise InvalidArgument(HEADLINE, reasons)
    return replace(problem, operands=(*problem.operands, (name, facts)))


def backward_problem(
    forward: AttnProblem,
    operands: Iterable[tuple[str, OperandFacts]] = (),
    gradients: Iterable[str] = GRADIENTS,
) -> AttnProblem:
    """The backward of `forward`: which gradients, and the facts of operands it reads and writes.

    Those named "q", "k" or "v" take the place of the forward's, which may have been saved elsewhere
    since; the forward's results "out" and "lse", their cotangents "dout" and "dlse", and memory for
    the gradients come in addition. Raises `InvalidArgument` with every reason why these do not fit
    the forward.
    """
    wanted, given = set(gradients), dict(operands)
    beside = {name: facts for name, facts in given.items() if name not in ("q", "k", "v")}
    reasons = _reasons_beside(forward, beside, "backward")
    known = ", ".join(GRADIENTS)
    reasons += [f"no gradient {name!r}: give some of {known}" for name in wanted - {*GRADIENTS}]
    if reasons:
        raise InvalidArgument("these arguments do not make a backward:", reasons)
    needed = tuple(name for name in GRADIENTS if name in wanted)
    merged = {**dict(forward.operands), **given}
    return replace(forward, operands=tuple(merged.items()), gradients=needed)


def _as_float(value: float) -> float:
    exact = isinstance(value, int) and not isinstance(value, bool) and -(2**53) < value < 2**53
    return float(value) if exact else value


def _as_bool(value: bool) -> bool:
    return bool(value) if isinstance(value, int) else value


def _rank_reasons(operands: tuple[tuple[str, OperandFacts], ...], packed: bool) -> list[str]:
    modes = "(total, heads, head_dim)" if packed else "(batch, seqlen, heads, head_dim)"
    return [
        f"{name} has shape {facts.shape}: give {modes}"
        for name, facts in operands
        if len(facts.shape) != (3 if packed else 4)
    ]


def _as_batch(facts: OperandFacts) -> OperandFacts:
    """Packed rows as a batch of one."""
    stride = facts.shape[0] * facts.strides[0] if facts.shape else 1
    return replace(facts, shape=(1, *facts.shape), strides=(stride, *facts.strides))


def _shape_reasons(q: OperandFacts, k: OperandFacts, v: OperandFacts) -> list[str]:
    """What is wrong with the shapes, of operands whose rank is right."""
    well_ranked = {
        name: facts.shape for name, facts in (("q", q), ("k", k), ("v", v)) if len(facts.shape) == 4
    }
    batches = {name: shape[0] for name, shape in well_ranked.items()}
    reasons = []
    # Sizes may be symbols, which have no hash.
    if any(size != other for size, other in pairwise(batches.values())):
        reasons.append(f"batch sizes of {', '.join(batches)} differ: {tuple(batches.values())}")
    if "k" in well_ranked and "v" in well_ranked:
        reasons += _key_value_reasons(well_ranked["k"], well_ranked["v"])
    if "q" in well_ranked and "k" in well_ranked:
        reasons += _query_key_reasons(well_ranked["q"], well_ranked["k"])
    head_dims = {name: shape[3] for name, shape in well_ranked.items()}
    if head_dims.get("k") == head_dims.get("q"):
        head_dims.pop("k", None)
    reasons += [
        f"head_dim of {name} is {size}: give a multiple of {HEAD_DIM_STEP} from {HEAD_DIM_STEP} to"
        f" {HEAD_DIM_MAX} (pad with zeros)"
        for name, size in head_dims.items()
        if size % HEAD_DIM_STEP or not HEAD_DIM_STEP <= size <= HEAD_DIM_MAX
    ]
    return reasons


def _key_value_reasons(k: tuple[int, ...], v: tuple[int, ...]) -> list[str]:
    return [
        f"k has {in_k} {what}, v has {in_v}: give as many of both"
        for what, in_k, in_v in (("keys", k[1], v[1]), ("heads", k[2], v[2]))
        if in_k != in_v
    ]


def _query_key_reasons(q: tuple[int, ...], k: tuple[int, ...]) -> list[str]:
    reasons = []
    heads_q, heads_k = q[2], k[2]
    if heads_q == 0 or heads_k == 0:
        reasons.append(f"q has {heads_q} heads, k has {heads_k}: give at least one of each")
    elif heads_q % heads_k:
        reasons.append(f"q has {heads_q} heads, not a multiple of the {heads_k} heads of k")
    if q[3] != k[3]:
        reasons.append(f"head_dim of q is {q[3]}, of k {k[3]}: give equal ones")
    return reasons


def _dtype_reasons(operands: tuple[tuple[str, OperandFacts], ...]) -> list[str]:
    reasons = []
    for name, facts in operands:
        if DType.of(facts.dtype) is None:
            way_out = "cast to bfloat16 or float16"
            if facts.dtype.removeprefix("torch.") == "float32":
                way_out += ", or call inside torch.autocast"
            reasons.append(f"{name} is {facts.dtype}: {way_out}")
    if len({facts.dtype for _, facts in operands}) > 1:
        found = ", ".join(f"{name} {facts.dtype}" for name, facts in operands)
        reasons.append(f"dtypes differ ({found}): give one dtype")
    return reasons


def _device_reasons(operands: tuple[tuple[str, OperandFacts], ...]) -> list[str]:
    if len({facts.device for _, facts in operands}) == 1:
        return []
    found = ", ".join(f"{name} on {facts.device}" for name, facts in operands)
    return [f"devices differ ({found}): give all on one device"]


def option_reasons(options: AttnOptions) -> list[str]:
    """What is wrong with options, whatever the tensors are."""
    numbers = {"dropout_p": options.dropout_p, "softcap": options.softcap}
    if options.softmax_scale is not None:
        numbers["softmax_scale"] = options.softmax_scale
    reasons = [
        f"{name} is {value!r}: give a number"
        for name, value in numbers.items()
        if not isinstance(value, Real)
    ]
    switches = ("causal", "deterministic", "return_attn_probs")
    reasons += [
        f"{name} is {value!r}: give True or False"
        for name in switches
        if not isinstance(value := getattr(options, name), int)
    ]
    margin = options.sm_margin
    if not isinstance(margin, int) or isinstance(margin, bool) or not 0 <= margin < 2**63:
        reasons.append(f"sm_margin is {margin!r}: give the number of SMs to leave free, or 0")
    dropout_p, softcap, scale = map(numbers.get, ("dropout_p", "softcap", "softmax_scale"))
    if isinstance(dropout_p, Real) and not 0.0 <= dropout_p < 1.0:
        reasons.append(f"dropout_p is {dropout_p}: give a probability in [0, 1)")
    if isinstance(scale, Real) and not -FP32_MAX <= scale <= FP32_MAX:
        reasons.append(
            f"softmax_scale is {scale}: give a number that fp32 holds, or None for 1/sqrt(d)"
        )
    if isinstance(softcap, Real) and softcap != 0 and not FP32_TINY <= softcap <= FP32_MAX:
        reasons.append(f"softcap is {softcap}: give a positive number that fp32 holds, or 0")
    try:
        MaskSpec.canonical(False, options.window_size)
    except InvalidArgument as refused:
        reasons += refused.reasons
    return reasons
