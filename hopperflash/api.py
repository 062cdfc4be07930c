"""The functions users call. They check nothing themselves: `problem` and `plan` do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypedDict

from torch import Tensor

from hopperflash import calls, ops, plan
from hopperflash.calls import Call
from hopperflash.errors import HopperflashError
from hopperflash.plan import LaunchPlan, Support
from hopperflash.problem import GRADIENTS, AttnOptions, Direction
from hopperflash.problem.lengths import LENGTHS

if TYPE_CHECKING:
    from typing_extensions import Unpack

WindowSize = tuple[int | None, int | None]
_TENSORS = (*LENGTHS, "max_seqlen_q", "max_seqlen_k", "out", "dout", "lse", "dlse", *GRADIENTS)


class AttnKeywords(TypedDict, total=False):
    """Options and further tensors, as `supports`, `make_plan` and `explain` take them."""

    dropout_p: float
    softmax_scale: float | None
    causal: bool
    window_size: WindowSize
    softcap: float
    alibi_slopes: Tensor | None
    deterministic: bool
    return_attn_probs: bool
    sm_margin: int
    return_lse: bool
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    seqused_q: Tensor | None
    seqused_k: Tensor | None
    max_seqlen_q: int | Tensor | None
    max_seqlen_k: int | Tensor | None
    out: Tensor | None
    dout: Tensor | None
    lse: Tensor | None
    dlse: Tensor | None
    dq: Tensor | None
    dk: Tensor | None
    dv: Tensor | None


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
    out: Tensor | None = None,
    backend: str | None = None,
    sm_margin: int = 0,
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
        out: memory to write the output to, of any strides; not where gradients are needed.
        backend: "sm90", "sm80" or "cpu"; default that of `use_backend`, or the first able one.
        sm_margin: streaming multiprocessors left free for other kernels, such as those that
            communicate, in this call and its backward; the cpu backend has none.

    Returns:
        out (batch, seqlen_q, heads_q, head_dim_v) in the dtype of q; with `return_lse` also the
        natural-log LSE (batch, heads_q, seqlen_q) in fp32. A row without keys: out 0, LSE -inf.

    Raises:
        InvalidArgument: the arguments do not make an attention problem; lists every reason.
        UnsupportedProblem: no backend computes it here; lists every backend's reasons.
    """
    options = AttnOptions(
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi=alibi_slopes is not None,
        deterministic=deterministic,
        return_attn_probs=return_attn_probs,
        sm_margin=sm_margin,
    )
    out, lse = ops.attention({"q": q, "k": k, "v": v, **_given(out=out)}, options, backend)
    return (out, lse) if return_lse else out


def flash_attn_varlen_func(  # noqa: PLR0913, PLR0917 - FlashAttention-2's order is a contract
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    backend: str | None = None,
    sm_margin: int = 0,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention within each of many sequences, packed one behind the other.

    Options are those of `flash_attn_func`; masks are aligned in each sequence by its own lengths.

    Args:
        q: (total_q, heads_q, head_dim).
        k, v: (total_k, heads_k, head_dim) and (total_k, heads_k, head_dim_v).
        cu_seqlens_q: (sequences + 1,) int32, or int64 which is cast: sequence s has the rows
            cu_seqlens_q[s] to cu_seqlens_q[s + 1] of q. Any may be empty.
        cu_seqlens_k: the same for k and v.
        max_seqlen_q, max_seqlen_k: for FlashAttention-2's signature, as int or 0-dim tensor. The
            kernels read every length on the device: no bound is looked at.
        seqused_q, seqused_k: (sequences,) how many of a sequence's first rows count; default all.

    Returns:
        out (total_q, heads_q, head_dim_v); with `return_lse` also the LSE (heads_q, total_q). Rows
        that belong to no sequence, or do not count, see no key: out 0, LSE -inf; and their
        gradients are 0, those of such rows of k and v too.

    Raises:
        InvalidArgument: as `flash_attn_func`; of CPU tensors also for offsets that descend or
            leave the rows. Those on a GPU are not looked at, since that would synchronise.
        UnsupportedProblem: as `flash_attn_func`.
    """
    options = AttnOptions(
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi=alibi_slopes is not None,
        deterministic=deterministic,
        return_attn_probs=return_attn_probs,
        sm_margin=sm_margin,
    )
    given = {
        "q": q,
        "k": k,
        "v": v,
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "max_seqlen_q": max_seqlen_q,
        "max_seqlen_k": max_seqlen_k,
        **_given(seqused_q=seqused_q, seqused_k=seqused_k, out=out),
    }
    out, lse = ops.attention(given, options, backend)
    return (out, lse) if return_lse else out


def flash_attn_backward(  # noqa: PLR0913, PLR0917 - close to FlashAttention-2's order
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    *,
    dlse: Tensor | None = None,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    backend: str | None = None,
    sm_margin: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients from the results of a forward, without autograd; not differentiable itself.

    `out` and `lse` may be those of attention over more keys than `k` holds: the gradients are then
    the part that these keys have in them, as passing keys around a ring of devices needs.

    Args:
        dout: the gradient of `out`, like it.
        q, k, v, and options: as the forward took them; with `cu_seqlens_q` and `cu_seqlens_k`
            as `flash_attn_varlen_func` did.
        lse: fp32, as the forward returned it.
        dlse: the gradient of `lse`, like it; default 0.
        dq, dk, dv: memory for the gradients, like q, k and v, of any strides.

    Returns:
        (dq, dk, dv), the given ones where they were.

    Raises:
        InvalidArgument, UnsupportedProblem: as the forward.
    """
    options = AttnOptions(
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi=alibi_slopes is not None,
        deterministic=deterministic,
        sm_margin=sm_margin,
    )
    given = {"q": q, "k": k, "v": v, "dout": dout, "out": out, "lse": lse}
    given |= _given(
        dlse=dlse,
        dq=dq,
        dk=dk,
        dv=dv,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
    )
    return ops.gradients(given, options, backend)


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
        call = _planned(q, k, v, arch, direction, backend, options)
        return plan.supports(call.problem, call.arch, direction, call.backend)
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

    Shapes, dtypes, strides and alignment of the tensors are read, and the values of lengths on a
    CPU. Packed sequences are given by their `cu_seqlens_q` and so on; memory for results as "out",
    or for a backward "dq" and so on. Raises as `flash_attn_func` does.
    """
    return _planned(q, k, v, arch, direction, backend, options).plan


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


def _planned(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    arch: str | None,
    direction: Direction,
    backend: str | None,
    keywords: Mapping[str, Any],
) -> Call:
    """The call of a public function that is asked about."""
    asked = dict(keywords)
    given = _given(**{name: asked.pop(name, None) for name in _TENSORS})
    alibi = asked.pop("alibi_slopes", None) is not None
    asked.pop("return_lse", None)  # the LSE is always computed
    options = AttnOptions(alibi=alibi, **asked)
    return calls.accept(
        {"q": q, "k": k, "v": v, **given}, options, direction=direction, arch=arch, backend=backend
    )


def _given(**tensors: Tensor | None) -> dict[str, Tensor]:
    """Those that were not left away."""
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}
