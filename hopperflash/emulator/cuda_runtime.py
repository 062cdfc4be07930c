"""The CUDA runtime symbols that compiled CuTe DSL host code calls, answered without a driver.

Kernel launches become `KernelLaunch` records handed to a callable at the moment they happen.
"""

import ctypes
import struct
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import EmulationError

Dim3 = tuple[int, int, int]

_SUCCESS = 0
_ERROR_LAUNCH_FAILURE = 719

_ATTRIBUTE_COOPERATIVE = 2
_ATTRIBUTE_CLUSTER = 4
_ATTRIBUTE_PROGRAMMATIC = 6

_KERNEL_ATTRIBUTE_STATIC_SHARED = 1
_MAX_THREADS = 1024

_MULTIPROCESSOR_COUNT = 16
_COMPUTE_CAPABILITY_MAJOR = 75
_COMPUTE_CAPABILITY_MINOR = 76
_MAX_SHARED_MEMORY_OPTIN = 97


@dataclass(frozen=True)
class DeviceFacts:
    """What host code may ask about the device that is being emulated."""

    compute_capability: tuple[int, int]
    multiprocessors: int
    max_shared_bytes: int

    @staticmethod
    def of_target(target: str) -> "DeviceFacts":
        """Facts of the device a PTX `.target` stands for: an H100 or, below sm_90, an A100."""
        digits = int("".join(c for c in target.split("_")[-1] if c.isdigit()) or 0)
        if digits >= 90:
            return DeviceFacts((digits // 10, digits % 10), 132, 232448)
        return DeviceFacts((digits // 10, digits % 10), 108, 166912)

    def attribute(self, attribute: int) -> int:
        """Value of a `cudaDeviceAttr`, as far as compiled host code asks for it."""
        values = {
            _MULTIPROCESSOR_COUNT: self.multiprocessors,
            _COMPUTE_CAPABILITY_MAJOR: self.compute_capability[0],
            _COMPUTE_CAPABILITY_MINOR: self.compute_capability[1],
            _MAX_SHARED_MEMORY_OPTIN: self.max_shared_bytes,
        }
        if attribute not in values:
            raise EmulationError(f"host code asks for device attribute {attribute}, not emulated")
        return values[attribute]


@dataclass(frozen=True)
class KernelSignature:
    """What the host side must know of a kernel."""

    parameter_bytes: tuple[int, ...]
    static_shared_bytes: int = 0
    required_block: Dim3 | None = None
    """The only block shape the kernel may be launched with (`.reqntid`)."""


@dataclass(frozen=True)
class KernelLaunch:
    """One captured kernel launch, with the parameter values copied out."""

    kernel_name: str
    grid: Dim3
    block: Dim3
    cluster: Dim3
    shared_bytes: int
    parameters: tuple[bytes, ...]
    cooperative: bool = False
    programmatic: bool = False


class _LaunchConfig(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_uint64),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint32),
    )


class _LaunchAttribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int32), ("pad", ctypes.c_int32), ("value", ctypes.c_uint8 * 64))


_POINTER, _INT, _SIZE = ctypes.c_void_p, ctypes.c_int32, ctypes.c_uint64

_PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "_cudaLibraryLoadData": (
        _POINTER,
        _POINTER,
        _POINTER,
        _POINTER,
        _INT,
        _POINTER,
        _POINTER,
        _INT,
    ),
    "_cudaLibraryGetKernel": (_POINTER, _POINTER, _POINTER),
    "_cudaGetDevice": (_POINTER,),
    "_cudaSetDevice": (_INT,),
    "_cudaDeviceGetAttribute": (_POINTER, _INT, _INT),
    "_cuKernelGetAttribute": (_POINTER, _INT, _POINTER, _INT),
    "_cudaKernelSetAttributeForDevice": (_POINTER, _INT, _INT, _INT),
    "_cudaFuncSetAttribute": (_POINTER, _INT, _INT),
    "_cudaOccupancyMaxActiveBlocksPerMultiprocessor": (_POINTER, _POINTER, _INT, _SIZE),
    "_cudaLaunchKernel": (_POINTER, *[_INT] * 6, _POINTER, _SIZE, _POINTER),
    "_cudaLaunchKernelEx": (_POINTER, _POINTER, _POINTER),
    "cuda_dialect_init_library_once": (_POINTER, _POINTER, _POINTER, _POINTER),
}


class CudaRuntime:
    """Callbacks for the runtime symbols of one compiled module.

    An exception cannot cross compiled code, so the first one is kept: every later call fails
    at once and `take_error` returns it when the host function is back.
    """

    def __init__(self, kernels: Mapping[str, KernelSignature], device: DeviceFacts) -> None:
        self.on_launch: Callable[[KernelLaunch], None] | None = None
        self.calls: Counter[str] = Counter()
        """How often each symbol was called, by its name in CUDA."""
        self._kernels = kernels
        self._device = device
        self._handles: list[str] = []
        self._error: BaseException | None = None
        self.callbacks: dict[str, Any] = {
            name: self._guarded(name, getattr(self, "_" + name.lstrip("_")), argument_types)
            for name, argument_types in _PROTOTYPES.items()
        }

    def refuse(self, name: str) -> Any:
        """A callback for a runtime symbol that is not emulated: reports its name when called."""

        def refused() -> int:
            raise EmulationError(f"host code calls {name.lstrip('_')}, which is not emulated")

        return self._guarded(name, refused, ())

    def take_error(self) -> BaseException | None:
        """The exception a callback met since the last call, if any."""
        error, self._error = self._error, None
        return error

    def _guarded(self, name: str, method: Callable[..., int], argument_types: Sequence[Any]) -> Any:
        def callback(*arguments: Any) -> int:
            self.calls[name.lstrip("_")] += 1
            if self._error is not None:
                return _ERROR_LAUNCH_FAILURE
            try:
                return method(*arguments)
            except BaseException as error:
                self._error = error
                return _ERROR_LAUNCH_FAILURE

        return ctypes.CFUNCTYPE(ctypes.c_int32, *argument_types)(callback)

    def _name_of(self, handle: int | None) -> str:
        if not handle:
            raise EmulationError("host code launches a kernel it has not loaded")
        return self._handles[handle - 1]

    def _cudaLibraryLoadData(self, out: int, *_: Any) -> int:
        _write_pointer(out, 1)
        return _SUCCESS

    def _cudaLibraryGetKernel(self, out: int, _library: int, name: int) -> int:
        text = ctypes.string_at(name).decode()
        if text not in self._kernels:
            raise EmulationError(
                f"the kept PTX has no kernel {text}; it defines {sorted(self._kernels)}. Another "
                "compile may have overwritten the file: give each process its own CUTE_DSL_DUMP_DIR"
            )
        self._handles.append(text)
        _write_pointer(out, len(self._handles))
        return _SUCCESS

    def _cudaGetDevice(self, out: int) -> int:
        _write_int(out, 0)
        return _SUCCESS

    def _cudaSetDevice(self, _device: int) -> int:
        return _SUCCESS

    def _cudaDeviceGetAttribute(self, out: int, attribute: int, _device: int) -> int:
        _write_int(out, self._device.attribute(attribute))
        return _SUCCESS

    def _cuKernelGetAttribute(self, out: int, attribute: int, kernel: int, _device: int) -> int:
        if attribute != _KERNEL_ATTRIBUTE_STATIC_SHARED:
            raise EmulationError(f"host code asks for kernel attribute {attribute}, not emulated")
        _write_int(out, self._kernels[self._name_of(kernel)].static_shared_bytes)
        return _SUCCESS

    def _cudaKernelSetAttributeForDevice(self, *_: Any) -> int:
        return _SUCCESS

    def _cudaFuncSetAttribute(self, *_: Any) -> int:
        return _SUCCESS

    def _cudaOccupancyMaxActiveBlocksPerMultiprocessor(self, out: int, *_: Any) -> int:
        _write_int(out, 1)
        return _SUCCESS

    def _cuda_dialect_init_library_once(
        self, state: int, init: int, load: int, set_error: int
    ) -> int:
        if ctypes.c_int64.from_address(state).value:
            return _SUCCESS
        library = ctypes.c_void_p()
        init_function = ctypes.CFUNCTYPE(_INT, _POINTER)(init)
        load_function = ctypes.CFUNCTYPE(_INT, _POINTER, _INT)(load)
        code: int = init_function(ctypes.addressof(library))
        code = code or load_function(ctypes.addressof(library), 0)
        if code == _SUCCESS:
            _write_pointer(state, 1)
        else:
            # TVM-FFI reads the raised error without asking whether there is one.
            raise_error = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p)(set_error)
            raise_error(b"RuntimeError", b"the kernels could not be loaded")
        return code

    def _cudaLaunchKernel(self, kernel: int, *rest: Any) -> int:
        *dims, arguments, shared_bytes, _stream = rest
        self._launch(kernel, (dims[0:3], dims[3:6], (1, 1, 1)), shared_bytes, arguments, {})
        return _SUCCESS

    def _cudaLaunchKernelEx(self, config: int, kernel: int, arguments: int) -> int:
        values = _LaunchConfig.from_address(config)
        attributes: dict[int, bytes] = {}
        if values.attribute_count:
            array = (_LaunchAttribute * values.attribute_count).from_address(values.attributes)
            attributes = {int(item.id): bytes(item.value) for item in array}
        cluster = struct.unpack_from("<3I", attributes.get(_ATTRIBUTE_CLUSTER, b"\1\0\0\0" * 3))
        dims = (values.grid, values.block, cluster)
        self._launch(kernel, dims, values.shared_bytes, arguments, attributes)
        return _SUCCESS

    def _launch(
        self,
        kernel: int,
        dims: tuple[Sequence[int], Sequence[int], Sequence[int]],
        shared_bytes: int,
        arguments: int,
        attributes: Mapping[int, bytes],
    ) -> None:
        name = self._name_of(kernel)
        grid, block, cluster = (_dim3(dim) for dim in dims)
        signature = self._kernels[name]
        if (
            min(*grid, *block, *cluster) < 1
            or any(extent % part for extent, part in zip(grid, cluster, strict=True))
            or block[0] * block[1] * block[2] > _MAX_THREADS
            or signature.required_block not in (None, block)
        ):
            raise EmulationError(
                f"invalid launch of {name}: grid {grid}, block {block}, cluster {cluster}"
                f" (.reqntid {signature.required_block})"
            )
        total_shared = shared_bytes + signature.static_shared_bytes
        if total_shared > self._device.max_shared_bytes:
            raise EmulationError(
                f"{name} asks for {total_shared} bytes of shared memory; "
                f"the device has {self._device.max_shared_bytes}"
            )
        sizes = signature.parameter_bytes
        pointers = (ctypes.c_void_p * len(sizes)).from_address(arguments) if sizes else ()
        launch = KernelLaunch(
            kernel_name=name,
            grid=grid,
            block=block,
            cluster=cluster,
            shared_bytes=shared_bytes,
            parameters=tuple(
                ctypes.string_at(pointer or 0, size)
                for pointer, size in zip(pointers, sizes, strict=True)
            ),
            cooperative=any(attributes.get(_ATTRIBUTE_COOPERATIVE, b"")[:4]),
            programmatic=any(attributes.get(_ATTRIBUTE_PROGRAMMATIC, b"")[:4]),
        )
        if self.on_launch is None:
            raise EmulationError(f"{name} launched outside an emulated call")
        self.on_launch(launch)


def _dim3(values: Sequence[int]) -> Dim3:
    x, y, z = (int(value) for value in values)
    return x, y, z


def _write_pointer(address: int, value: int) -> None:
    ctypes.c_uint64.from_address(address).value = value


def _write_int(address: int, value: int) -> None:
    ctypes.c_int32.from_address(address).value = value
