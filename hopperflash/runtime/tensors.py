"""Torch tensors to plain facts, and back to what a kernel can address."""

from __future__ import annotations

import torch
from torch import Tensor

from hopperflash.plan import LaunchPlan
from hopperflash.problem import AttnProblem, OperandFacts

_MAX_ALIGNMENT = 128


def facts(tensor: Tensor) -> OperandFacts:
    """Shape, strides, alignment, dtype and device of a tensor; its values are not looked at."""
    address = tensor.data_ptr()
    return OperandFacts(
        shape=tuple(tensor.shape),
        strides=tuple(tensor.stride()),
        alignment=min(address & -address, _MAX_ALIGNMENT) if address else _MAX_ALIGNMENT,
        dtype=str(tensor.dtype).removeprefix("torch."),
        device=str(tensor.device),
    )


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Inside torch.autocast, fp32 operands in its dtype; otherwise the tensors as they are."""
    device_type = tensors[0].device.type
    if not torch.is_autocast_enabled(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(t.to(dtype) if t.dtype is torch.float32 else t for t in tensors)


def prepare_operands(plan: LaunchPlan, operands: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies what the plan says must be copied and normalises strides that are never used."""
    copied = {copy.operand for copy in plan.copies}
    return {
        name: _unused_strides_aligned(
            tensor.clone(memory_format=torch.contiguous_format) if name in copied else tensor
        )
        for name, tensor in operands.items()
    }


def _unused_strides_aligned(tensor: Tensor) -> Tensor:
    """The stride of a dimension of length 1 may be anything; the compiled argument check wants a
    multiple of 16 bytes all the same."""
    strides = tuple(
        tensor.shape[-1] if length == 1 else stride
        for length, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    )
    return tensor.as_strided(tensor.shape, (*strides, 1))


def allocate_results(problem: AttnProblem, like: Tensor, *, poison: bool) -> dict[str, Tensor]:
    """out (batch, seqlen_q, heads_q, head_dim_v) and lse (batch, heads_q, seqlen_q) in fp32.

    `poison` fills them with NaN, so that a row the kernel forgets is seen.
    """
    p = problem
    out = like.new_empty(p.batch, p.seqlen_q, p.heads_q, p.head_dim_v)
    lse = like.new_empty(p.batch, p.heads_q, p.seqlen_q, dtype=torch.float32)
    if poison:
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
    return {"out": out, "lse": lse}
