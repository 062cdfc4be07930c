"""The functions users call. They check nothing themselves: `problem` and `plan` do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

from torch import Tensor

from hopperflash import ops, plan
from hopperflash.errors import HopperflashError
from hopperflash.plan import ArchSpec, LaunchPlan, Support
from hopperflash.problem import AttnOptions, AttnProblem, Direction, build_problem
from hopperflash.runtime import device, preference, tensors

if TYPE_CHECKING:
    from typing_extensions import Unpack

WindowSize = tuple[int | None, int | None]


class AttnKeywords(TypedDict, total=False):
    """The options of `flash_attn_func`, as `supports`, `make_plan` and `explain` take them."""

    dropout_p: float
    softmax_scale: float | None
    causal: bool
    window_size: WindowSize
    softcap: float
    alibi_slopes: Tensor | None
    deterministic: bool
    return_attn_probs: bool
    return_lse: bool


def flash_attn_func(  # noqa: PLR0913, PLR0917 - FlashAttention-2's positional order is a contract
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention, softmax(scale * Q K^T + mask) V, on GPU tensors or CPU tensors.

    CPU tensors use the `cpu` backend; inside `hopperflash.emulate` they execute the GPU kernels.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim), fp16 or bf16; fp32 is cast inside torch.autocast.
        k: (batch, seqlen_k, heads_k, head_dim); heads_q is a multiple of heads_k, and query head h
            uses key head h // (heads_q // heads_k).
        v: (batch, seqlen_k, heads_k, head_dim_v). Head dims are multiples of 8 from 8 to 256.
        softmax_scale: default 1 / sqrt(head_dim).
        causal: query i sees key j iff j <= i + seqlen_k - seqlen_q (bottom-right aligned).
        window_size: (left, right), inclusive: query i sees key j iff
            i + seqlen_k - seqlen_q - left <= j <= i + seqlen_k - seqlen_q + right; -1 is unbounded.
        softcap: scores become softcap * tanh(scores / softcap) where positive.
        dropout_p, alibi_slopes, return_attn_probs: for FlashAttention-2's signature; refused
            unless at their defaults.
        deterministic: gradients equal bit for bit between runs.
        return_lse: also return the log-sum-exp.
        backend: "sm90", "sm80" or "cpu"; default that of `use_backend`, or the first able one.

    Returns:
        out (batch, seqlen_q, heads_q, head_dim_v) in the dtype of q; with `return_lse` also the
        natural-log LSE (batch, heads_q, seqlen_q) in fp32. A row without keys: out 0, LSE -inf.

    Raises:
        InvalidArgument: the arguments do not make an attention problem; lists every reason.
        UnsupportedProblem: no backend computes it here; lists every backend's reasons.
    """
    operands = tensors.accept(q=q, k=k, v=v)
    launch_plan = make_plan(
        *operands,
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        deterministic=deterministic,
        return_attn_probs=return_attn_probs,
        backend=backend,
    )
    out, lse = ops.attention(launch_plan, *operands)
    return (out, lse) if return_lse else out


def supports(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    arch: str | None = None,
    direction: Direction = "forward",
    backend: str | None = None,
    **options: Unpack[AttnKeywords],
) -> Support:
    """Whether `flash_attn_func` takes these arguments, and every reason where it does not.

    `arch`, such as "sm_90a", defaults to that of the tensors' device; where it is given, tensors of
    the meta device will do. With `backend` only that one is asked.
    """
    try:
        problem, spec, backend = _problem(q, k, v, arch, backend, **options)
        return plan.supports(problem, spec, direction, backend)
    except HopperflashError as refused:
        return Support(False, refused.reasons or (refused.headline,))


def make_plan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    arch: str | None = None,
    direction: Direction = "forward",
    backend: str | None = None,
    **options: Unpack[AttnKeywords],
) -> LaunchPlan:
    """What `flash_attn_func` would run, as data: backend, kernels, tiles, grid, copies and why.

    Only shapes, dtypes, strides and alignment of the tensors are read; where `arch` is given,
    tensors of the meta device, which take no memory, will do. Raises as `flash_attn_func` does.
    """
    problem, spec, backend = _problem(q, k, v, arch, backend, **options)
    return plan.make_plan(problem, spec, direction, backend)


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    arch: str | None = None,
    direction: Direction = "forward",
    backend: str | None = None,
    **options: Unpack[AttnKeywords],
) -> str:
    """The plan of `make_plan` with its reasons and arithmetic, for people."""
    return plan.explain(
        make_plan(q, k, v, arch=arch, direction=direction, backend=backend, **options)
    )


def _problem(
    q: Tensor, k: Tensor, v: Tensor, arch: str | None, backend: str | None, **options: Any
) -> tuple[AttnProblem, ArchSpec, str | None]:
    """The problem, the architecture to plan for, and the backend that was asked for, if one was."""
    alibi = options.pop("alibi_slopes", None) is not None
    options.pop("return_lse", None)  # the LSE is always computed
    operands = tensors.accept(meta=arch is not None, q=q, k=k, v=v)
    q_facts, k_facts, v_facts = (tensors.facts(operand) for operand in operands)
    problem = build_problem(q_facts, k_facts, v_facts, AttnOptions(alibi=alibi, **options))
    backend = backend or preference.preferred()
    return problem, device.target_arch(q.device, arch, backend), backend
