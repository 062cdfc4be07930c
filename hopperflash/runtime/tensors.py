"""Torch tensors to plain facts, and back to what a kernel can address."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hopperflash.errors import InvalidArgument
from hopperflash.plan import Buffer, LaunchPlan
from hopperflash.problem import OperandFacts
from hopperflash.problem.lengths import offset_reasons, used_reasons

_MAX_ALIGNMENT = 128


def accept(**operands: object) -> tuple[Tensor, ...]:
    """The operands as dense tensors; inside torch.autocast, fp32 ones in its dtype.

    Raises `InvalidArgument` for what is not a dense tensor on a CPU or a CUDA GPU.
    """
    reasons, tensors = [], []
    for name, value in operands.items():
        if not isinstance(value, Tensor):
            reasons.append(f"{name} is a {type(value).__name__}: give a torch.Tensor")
        elif value.layout is not torch.strided:
            reasons.append(f"{name} has layout {value.layout}: give a dense tensor")
        elif value.device.type not in ("cpu", "cuda"):
            reasons.append(f"{name} is on {value.device}: give tensors on cpu or cuda")
        else:
            tensors.append(_concrete(value))
    if reasons:
        raise InvalidArgument("these arguments are not tensors to attend over:", reasons)
    return tuple(tensors)


def accept_lengths(**lengths: object) -> dict[str, Tensor] | None:
    """Offsets and lengths of packed sequences as contiguous int32 tensors; None where all are None.

    Raises `InvalidArgument` for what is not an integer tensor.
    """
    given = {name: value for name, value in lengths.items() if value is not None}
    reasons, tensors = [], {}
    for name, value in given.items():
        if not isinstance(value, Tensor):
            reasons.append(f"{name} is a {type(value).__name__}: give a torch.Tensor")
        elif value.dtype not in (torch.int32, torch.int64):
            reasons.append(f"{name} is {value.dtype}: give int32 or int64")
        else:
            tensors[name] = value.detach().to(torch.int32).contiguous()
    if reasons:
        raise InvalidArgument("these arguments are not lengths of sequences:", reasons)
    return tensors or None


def check_lengths(lengths: Mapping[str, Tensor], totals: tuple[int, int]) -> None:
    """Looks at the values where that costs no synchronisation: of CPU tensors.

    Raises `InvalidArgument` for offsets that descend or leave the rows.
    """
    reasons = []
    for side, total in zip("qk", totals, strict=True):
        offsets, used = lengths[f"cu_seqlens_{side}"], lengths.get(f"seqused_{side}")
        if offsets.device.type == "cpu":
            values = offsets.tolist()
            reasons += offset_reasons(f"cu_seqlens_{side}", values, total)
            if used is not None:
                reasons += used_reasons(f"seqused_{side}", used.tolist(), values)
    if reasons:
        raise InvalidArgument("these are not the lengths of packed sequences:", reasons)


def _concrete(tensor: Tensor) -> Tensor:
    # Kernels read memory as it lies, so a lazily negated view is made real.
    tensor = tensor.resolve_neg()
    device_type = tensor.device.type
    if tensor.dtype is not torch.float32 or not torch.is_autocast_enabled(device_type):
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
