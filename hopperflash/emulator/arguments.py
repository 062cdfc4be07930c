"""CPU tensors that pose as device tensors in an emulated call, and the memory they span."""

import ctypes
import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

_DEVICE_TYPE_OFFSET = 8  # of DLDevice in DLManagedTensor, behind the data pointer
_DLPACK_CUDA = 2


class Region(NamedTuple):
    """A named range of process memory that kernels may touch."""

    start: int
    nbytes: int
    name: str


class DeviceView:
    """A DLPack producer that offers a CPU tensor's memory as device memory.

    `cute.runtime.from_dlpack(DeviceView(t))` compiles global-memory accesses, and functions
    compiled with TVM-FFI accept it where they check for a CUDA tensor.
    """

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor.detach()

    def __dlpack__(self, **_: Any) -> Any:
        from torch.utils.dlpack import to_dlpack  # type: ignore[attr-defined]

        capsule = to_dlpack(self.tensor)
        get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
        get_pointer.restype, get_pointer.argtypes = (
            ctypes.c_void_p,
            [ctypes.py_object, ctypes.c_char_p],
        )
        address = get_pointer(capsule, b"dltensor")
        ctypes.c_int32.from_address(address + _DEVICE_TYPE_OFFSET).value = _DLPACK_CUDA
        return capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return _DLPACK_CUDA, 0


def on_device(argument: Any) -> Any:
    """The argument with every torch CPU tensor in it replaced by a TVM-FFI device tensor."""
    import torch
    import tvm_ffi

    if isinstance(argument, torch.Tensor):
        return tvm_ffi.from_dlpack(DeviceView(argument))
    if isinstance(argument, tuple) and hasattr(argument, "_fields"):
        return type(argument)(*(on_device(item) for item in argument))
    if isinstance(argument, (list, tuple)):
        return type(argument)(on_device(item) for item in argument)
    return argument


def memory_regions(
    names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[Region]:
    """Disjoint regions spanned by all tensors in the arguments, each named after its argument.

    Tensors that share memory share a region that carries all their names.
    """
    labels = [*names, *(f"argument {i}" for i in range(len(names), len(args)))]
    found: list[Region] = []
    for label, value in [*zip(labels, args, strict=False), *kwargs.items()]:
        found.extend(_regions_in(label, value))
    merged: list[Region] = []
    for region in sorted(found):
        if merged and region.start < merged[-1].start + merged[-1].nbytes:
            last = merged.pop()
            end = max(last.start + last.nbytes, region.start + region.nbytes)
            name = last.name if region.name == last.name else f"{last.name}, {region.name}"
            region = Region(last.start, end - last.start, name)
        merged.append(region)
    return merged


def _regions_in(label: str, value: Any) -> Iterator[Region]:
    described = _describe(value)
    if described is not None:
        start, shape, stride, itemsize = described
        if all(extent > 0 for extent in shape):
            reach = [(extent - 1) * step for extent, step in zip(shape, stride, strict=True)]
            low = sum(step for step in reach if step < 0)
            high = sum(step for step in reach if step > 0)
            yield Region(start + low * itemsize, (high - low + 1) * itemsize, label)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _regions_in(f"{label}[{index}]", item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _regions_in(f"{label}[{key!r}]", item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _regions_in(f"{label}.{field.name}", getattr(value, field.name))


def _describe(value: Any) -> tuple[int, tuple[int, ...], tuple[int, ...], int] | None:
    """Address, shape, strides in elements and element bytes of a torch or CuTe tensor."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.data_ptr(), tuple(value.shape), value.stride(), value.itemsize
    runtime = sys.modules.get("cutlass.cute.runtime")
    # CuTe tensors report another class, so only their real type tells them apart.
    if runtime is not None and type(value) is runtime._Tensor:
        tensor: Any = value
        itemsize = max(tensor.element_type.width // 8, 1)
        return tensor.data_ptr, tuple(tensor.shape), tuple(tensor.stride), itemsize
    return None
