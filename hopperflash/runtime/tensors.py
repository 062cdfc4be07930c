"""Torch tensors to plain facts, and back to what a kernel can address."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hopperflash.errors import InvalidArgument
from hopperflash.plan import Buffer, LaunchPlan
from hopperflash.problem import OperandFacts

_MAX_ALIGNMENT = 128


def accept(*, meta: bool = False, **operands: object) -> tuple[Tensor, ...]:
    """The operands as dense tensors; inside torch.autocast, fp32 ones in its dtype.

    Raises `InvalidArgument` for what is not a dense tensor on a CPU or a CUDA GPU, or, where `meta`
    allows it, on the meta device: enough to plan with, and never cast.
    """
    reasons, tensors = [], []
    devices = ("cpu", "cuda", "meta") if meta else ("cpu", "cuda")
    for name, value in operands.items():
        if not isinstance(value, Tensor):
            reasons.append(f"{name} is a {type(value).__name__}: give a torch.Tensor")
        elif value.layout is not torch.strided:
            reasons.append(f"{name} has layout {value.layout}: give a dense tensor")
        elif value.device.type not in devices:
            reasons.append(f"{name} is on {value.device}: give tensors on {' or '.join(devices)}")
        else:
            tensors.append(_concrete(value))
    if reasons:
        raise InvalidArgument("these arguments are not tensors to attend over:", reasons)
    return tuple(tensors)


def _concrete(tensor: Tensor) -> Tensor:
    # Kernels read memory as it lies, so a lazily negated view is made real.
    tensor = tensor.resolve_neg()
    device_type = tensor.device.type
    if tensor.dtype is not torch.float32 or tensor.is_meta:
        return tensor
    if not torch.is_autocast_enabled(device_type):
        return tensor
    return tensor.to(torch.get_autocast_dtype(device_type))


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


def prepare_operands(plan: LaunchPlan, operands: Mapping[str, Tensor]) -> dict[str, Tensor]:
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


def allocate(buffers: Sequence[Buffer], like: Tensor, *, poison: bool) -> dict[str, Tensor]:
    """Contiguous tensors on the device of `like`, by name.

    `poison` fills floating-point memory with NaN, so that a kernel that forgets to write an element
    or reads one that nobody wrote is seen.
    """
    tensors = {}
    for buffer in buffers:
        dtype = getattr(torch, buffer.dtype)
        if buffer.zeroed:
            tensor = like.new_zeros(buffer.shape, dtype=dtype)
        elif poison and dtype.is_floating_point:
            tensor = like.new_full(buffer.shape, torch.nan, dtype=dtype)
        else:
            tensor = like.new_empty(buffer.shape, dtype=dtype)
        tensors[buffer.name] = tensor
    return tensors
