"""Torch tensors to plain facts, and back to what a kernel can address."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch._guards import detect_fake_mode

from hopperflash.plan import Buffer, LaunchPlan
from hopperflash.problem import OperandFacts
from hopperflash.problem.lengths import offset_reasons, used_reasons

_MAX_ALIGNMENT = 16  # what kernels ask for; finer facts would make plans of equal calls differ
_NO_INDEX = 2**30
_INTEGERS = (torch.int32, torch.int64)


def operand_reasons(name: str, value: object, *, meta: bool = False) -> Iterator[str]:
    """What keeps a value from being an operand; one of the meta device is enough to plan with."""
    devices = ("cpu", "cuda", "meta") if meta else ("cpu", "cuda")
    if not isinstance(value, Tensor):
        yield f"{name} is a {type(value).__name__}: give a torch.Tensor"
    elif value.is_nested:
        yield (
            f"{name} is a nested tensor: give packed sequences (total, heads, head_dim) and their"
            " offsets to flash_attn_varlen_func"
        )
    elif value.layout is not torch.strided:
        yield f"{name} has layout {value.layout}: give a dense tensor"
    elif value.device.type not in devices:
        yield f"{name} is on {value.device}: give tensors on {' or '.join(devices)}"


def lengths_reasons(name: str, value: object, *, meta: bool = False) -> Iterator[str]:
    """What keeps a value from holding offsets or lengths of sequences."""
    not_dense = list(operand_reasons(name, value, meta=meta))
    yield from not_dense
    if not not_dense and isinstance(value, Tensor) and value.dtype not in _INTEGERS:
        yield f"{name} is {value.dtype}: give int32 or int64"


def max_seqlen_reasons(name: str, value: object) -> Iterator[str]:
    """What keeps a value from being a bound of lengths; that of a tensor is not looked at."""
    way_out = "give an int, or a 0-dim tensor of int32 or int64"
    if isinstance(value, Tensor):
        if value.dim() or value.dtype not in _INTEGERS:
            found = f"{value.dtype} tensor of shape {tuple(value.shape)}"
            yield f"{name} is a {found}: {way_out}"
        return
    try:
        if operator.index(value) < 0:  # type: ignore[arg-type]
            yield f"{name} is {value}: give a length"
    except TypeError:
        yield f"{name} is a {type(value).__name__}: {way_out}"


def int32(lengths: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Offsets and lengths as the kernels read them: contiguous, and cast where they are int64."""
    return {name: x.detach().to(torch.int32).contiguous() for name, x in lengths.items()}


def value_reasons(lengths: Mapping[str, Tensor], totals: Mapping[str, int]) -> Iterator[str]:
    """Offsets of CPU tensors that descend or leave the rows, `totals` of which "q" and "k" have.

    Those on a GPU are not looked at, since that would synchronise.
    """
    for side, total in totals.items():
        offsets, used = lengths.get(f"cu_seqlens_{side}"), lengths.get(f"seqused_{side}")
        if offsets is None or offsets.device.type != "cpu" or offsets.dim() != 1:
            continue
        if not has_values(offsets):
            continue
        values = offsets.tolist()
        yield from offset_reasons(f"cu_seqlens_{side}", values, total)
        if used is not None and used.device.type == "cpu" and used.dim() == 1:
            yield from used_reasons(f"seqused_{side}", used.tolist(), values)


def has_values(tensor: Tensor) -> bool:
    """Whether there is memory behind it: not on the meta device, nor while shapes are traced."""
    return not tensor.is_meta and detect_fake_mode(tensor) is None


def result_reasons(results: Mapping[str, Tensor], operands: Mapping[str, Tensor]) -> Iterator[str]:
    """What keeps given memory from being written to: autograd, or that it holds an operand."""
    yield from gradient_reasons(results, operands)
    for name, result in results.items():
        if result.is_neg():
            yield f"{name} is a lazily negated view: give memory that holds values as they are"
        for other, operand in (*operands.items(), *results.items()):
            if other != name and _share_memory(result, operand):
                yield f"{name} shares memory with {other}: give memory of its own"


def gradient_reasons(
    results: Mapping[str, Tensor], operands: Mapping[str, Tensor]
) -> Iterator[str]:
    """Given memory whose values autograd would take for constants."""
    differentiable = [name for name, x in (*operands.items(), *results.items()) if x.requires_grad]
    for name in results if differentiable and torch.is_grad_enabled() else ():
        yield (
            f"{name} is given, but {', '.join(differentiable)} may need gradients: call inside"
            f" torch.no_grad(), or leave {name} away"
        )


def _share_memory(one: Tensor, other: Tensor) -> bool:
    """Whether address ranges meet; interleaved views count as if they did."""
    if 0 in (one.numel(), other.numel()):
        return False
    (begin, end), (other_begin, other_end) = _addresses(one), _addresses(other)
    return begin < other_end and other_begin < end


def _addresses(tensor: Tensor) -> tuple[int, int]:
    reach = sum(
        (length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return tensor.data_ptr(), tensor.data_ptr() + (reach + 1) * tensor.element_size()


def concrete(tensor: Tensor) -> Tensor:
    """The tensor with values as they lie in memory; inside torch.autocast, fp32 in its dtype."""
    # Kernels read memory as it lies, so a lazily negated view is made real.
    tensor = tensor.resolve_neg() if tensor.is_neg() else tensor
    device_type = tensor.device.type
    if tensor.dtype is not torch.float32 or tensor.is_meta:
        return tensor
    if not torch.is_autocast_enabled(device_type):
        return tensor
    return tensor.to(torch.get_autocast_dtype(device_type))


class Seen(NamedTuple):
    """What is looked at of a tensor, as torch says it; `facts` says it plainly."""

    shape: torch.Size
    strides: tuple[int, ...]
    alignment: int
    dtype: torch.dtype
    device: torch.device


def seen(tensor: Tensor) -> Seen:
    """Shape, strides, alignment, dtype and device of a tensor; its values are not looked at."""
    address = tensor.data_ptr()
    alignment = min(address & -address, _MAX_ALIGNMENT) if address else _MAX_ALIGNMENT
    return Seen(tensor.shape, tensor.stride(), alignment, tensor.dtype, tensor.device)


def facts(seen: Seen) -> OperandFacts:
    """The same without torch."""
    return OperandFacts(
        shape=tuple(seen.shape),
        strides=tuple(seen.strides),
        alignment=seen.alignment,
        dtype=str(seen.dtype).removeprefix("torch."),
        device=str(seen.device),
    )


def prepare_operands(plan: LaunchPlan, operands: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies what the plan says must be copied and normalises strides that are never used."""
    copied = {copy.operand for copy in plan.copies}
    replaced = {copy.operand for copy in plan.copies_back}
    return {
        name: _unused_strides_aligned(
            tensor.clone(memory_format=torch.contiguous_format) if name in copied else tensor
        )
        for name, tensor in operands.items()
        if name not in replaced
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

    `poison` fills memory with NaN, and with integers that are no index of anything, so that a
    kernel that forgets to write an element or reads one that nobody wrote is seen.
    """
    tensors = {}
    for buffer in buffers:
        dtype = getattr(torch, buffer.dtype)
        if buffer.zeroed:
            tensor = like.new_zeros(buffer.shape, dtype=dtype)
        elif poison:
            value = torch.nan if dtype.is_floating_point else _NO_INDEX
            tensor = like.new_full(buffer.shape, value, dtype=dtype)
        else:
            tensor = like.new_empty(buffer.shape, dtype=dtype)
        tensors[buffer.name] = tensor
    return tensors
