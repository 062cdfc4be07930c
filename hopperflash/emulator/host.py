"""Runs the real host code of a compiled CuTe DSL function without a GPU.

The LLVM module the compiler kept is given to an execution engine of its own, in which the CUDA
runtime symbols are `CudaRuntime` callbacks. Everything else is what a GPU run would execute: the
argument checks of TVM-FFI, grid computation, tensor map construction.
"""

import ctypes
import dataclasses
import inspect
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import Any, NamedTuple

from .arguments import on_device
from .cuda_runtime import (
    CudaRuntime,
    DeviceFacts,
    KernelLaunch,
    KernelSignature,
)
from .errors import EmulationError
from .host_object import HostObject, link

_TVM_FFI_SYMBOLS = (
    "TVMFFIErrorSetRaisedFromCStr",
    "TVMFFIErrorSetRaisedFromCStrParts",
    "TVMFFIEnvGetStream",
)
_UNLOAD = "cuda_dialect_unload_library_once"
_SAFE_CALL = ctypes.CFUNCTYPE(
    ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p
)


_USAGE = re.compile(r" when calling: (`.*`)")


class HostSymbols(NamedTuple):
    """What an LLVM module says about itself."""

    defined: frozenset[str]
    """Functions it defines."""
    declared: tuple[str, ...]
    """Functions it expects to find."""
    usage: str
    """TVM-FFI's rendering of the call, such as `` `f(x: Tensor([n0], float16))` ``."""


class HostProgram:
    """A host function whose CUDA runtime calls are answered by `CudaRuntime`."""

    signature: inspect.Signature
    _call: Callable[[Sequence[Any], Mapping[str, Any]], Any]

    def __init__(self, kernels: Mapping[str, KernelSignature], device: DeviceFacts) -> None:
        self._lock = Lock()
        self._runtime = CudaRuntime(kernels, device)
        self._keep_alive: list[Any] = []

    def run(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        on_launch: Callable[[KernelLaunch], None],
        calls: Counter[str] | None = None,
    ) -> Any:
        """Calls the host function; `on_launch` runs inside it, once per kernel launch, and `calls`
        counts what it calls of the CUDA runtime.

        An exception from `on_launch` stops the host function and comes out here.
        """
        with self._lock:
            self._runtime.on_launch = on_launch
            calls = Counter() if calls is None else calls
            # Those made before the first run are its own: plain functions load their kernels then.
            calls.update(self._runtime.calls)
            self._runtime.calls = calls
            try:
                result = self._call(args, kwargs)
            except Exception:
                error = self._runtime.take_error()
                if error is not None:
                    raise error from None
                raise
            finally:
                self._runtime.on_launch = None
                self._runtime.calls = Counter()
            error = self._runtime.take_error()
            if error is not None:
                raise error
            return result

    def _callbacks(self, declared: Sequence[str]) -> dict[str, int]:
        """Addresses of what answers the declared symbols; those of other libraries are left out."""
        libraries = self._tvm_ffi_symbols(declared)
        addresses: dict[str, int] = {}
        for name in declared:
            if name in libraries:
                callback = libraries[name]
            elif name == _UNLOAD:
                # Runs when the engine dies, perhaps after our callbacks did: any C function
                # without effect will do.
                callback = ctypes.pythonapi.Py_IsInitialized
            elif name in self._runtime.callbacks:
                callback = self._runtime.callbacks[name]
            elif name.startswith(("_cu", "cuda_")):
                callback = self._runtime.refuse(name)
            else:
                continue
            self._keep_alive.append(callback)
            addresses[name] = ctypes.cast(callback, ctypes.c_void_p).value or 0
        return addresses

    def _tvm_ffi_symbols(self, declared: Sequence[str]) -> dict[str, Any]:
        if not any(name in _TVM_FFI_SYMBOLS for name in declared):
            return {}
        from tvm_ffi.libinfo import find_libtvm_ffi

        library = ctypes.CDLL(find_libtvm_ffi())
        set_raised = library.TVMFFIErrorSetRaisedFromCStr
        set_raised.argtypes, set_raised.restype = (ctypes.c_char_p, ctypes.c_char_p), None

        # The caller expects a raised TVM-FFI error for every runtime error code.
        def raise_cuda_error(_: int, code: int) -> None:
            set_raised(b"RuntimeError", f"emulated CUDA error {code}".encode())

        def error_name(code: int) -> int:
            return ctypes.addressof(unknown_error)

        unknown_error = ctypes.create_string_buffer(b"emulated CUDA error")
        return {
            **{name: getattr(library, name) for name in _TVM_FFI_SYMBOLS},
            "CuteDSLRT_TVMFFISetRaisedCudaError": ctypes.CFUNCTYPE(
                None, ctypes.c_void_p, ctypes.c_int32
            )(raise_cuda_error),
            "cuda_dialect_get_error_name": ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int32)(
                error_name
            ),
        }


class CompiledHost(HostProgram):
    """The host function of one `cute.compile` result, plain or with TVM-FFI."""

    def __init__(
        self, compiled: Any, kernels: Mapping[str, KernelSignature], device: DeviceFacts
    ) -> None:
        from cutlass._mlir.execution_engine import ExecutionEngine

        super().__init__(kernels, device)
        if compiled.ir_module is None:
            raise EmulationError(
                "the compiled function has no host IR (was it loaded from a binary?); "
                "only the result of cute.compile can be emulated"
            )
        self._compiled = compiled
        symbols = host_symbols(compiled.ir_module)
        self.signature = visible_signature(compiled, symbols)
        self._engine = ExecutionEngine(compiled.ir_module, opt_level=2, shared_libs=[])
        for name, address in self._callbacks(symbols.declared).items():
            self._engine.raw_register_runtime(name, ctypes.c_void_p(address))
        if f"__tvm_ffi_{compiled.function_name}" in symbols.defined:
            self._call = self._tvm_ffi_call()
        else:
            self._load_library(symbols.defined)
            self._call = self._plain_call()

    def _packed(self, name: str) -> Callable[..., None]:
        """A function of the module that takes the addresses of its arguments and its result."""
        function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._engine.raw_lookup(name))

        def call(*addresses: Any) -> None:
            array = (ctypes.c_void_p * len(addresses))(*addresses)
            function(ctypes.addressof(array))

        return call

    def _load_library(self, defined: frozenset[str]) -> None:
        """What the library does on first use of a plain function: resolve its kernel handles."""
        if "cuda_init" not in defined:
            return
        library, error, device = ctypes.c_void_p(), ctypes.c_int32(), ctypes.c_int32()
        slot = ctypes.c_void_p(ctypes.addressof(library))
        addresses = [ctypes.addressof(value) for value in (slot, device, error)]
        self._packed("cuda_init")(addresses[0], addresses[2])
        if error.value == 0:
            self._packed("cuda_load_to_device")(*addresses)
        pending = self._runtime.take_error()
        if pending is not None:
            raise pending
        if error.value:
            raise EmulationError(f"the kernels could not be loaded: error {error.value}")

    def _plain_call(self) -> Callable[[Sequence[Any], Mapping[str, Any]], Any]:
        function = self._packed(f"_mlir_ciface_{self._compiled.function_name}")
        execution_args = self._compiled.execution_args

        def call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
            pointers, _adapted = execution_args.generate_execution_args(tuple(args), dict(kwargs))
            result = ctypes.c_int32(0)
            function(*pointers, ctypes.addressof(result))
            if result.value:
                raise EmulationError(f"the host function returned error {result.value}")
            return result.value

        return call

    def _tvm_ffi_call(self) -> Callable[[Sequence[Any], Mapping[str, Any]], Any]:
        import tvm_ffi

        packed = self._packed(f"__tvm_ffi_{self._compiled.function_name}")

        def safe_call(handle: int | None, arguments: int, count: int, result: int) -> int:
            values = (
                ctypes.c_void_p(handle),
                ctypes.c_void_p(arguments),
                ctypes.c_int32(count),
                ctypes.c_void_p(result),
                ctypes.c_int32(),
            )
            packed(*(ctypes.addressof(value) for value in values))
            return values[-1].value

        trampoline = _SAFE_CALL(safe_call)
        self._keep_alive.append(trampoline)
        function = tvm_ffi.Function.__from_extern_c__(
            ctypes.cast(trampoline, ctypes.c_void_p).value or 0, keep_alive_object=trampoline
        )
        execution_args = self._compiled.execution_args

        def call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
            values, keywords = tuple(args), dict(kwargs)
            if execution_args.has_pointer_address_arg_specs:
                values, keywords = execution_args.convert_python_pointer_args_for_tvm_ffi(
                    values, keywords
                )
            bound = self.signature.bind(*values, **keywords)
            bound.apply_defaults()
            return function(*(_tvm_ffi_value(value) for value in bound.arguments.values()))

        return call


class LinkedHost(HostProgram):
    """A host function that was exported as a `HostObject`: no compiler is imported to run it."""

    def __init__(
        self, host: HostObject, kernels: Mapping[str, KernelSignature], device: DeviceFacts
    ) -> None:
        super().__init__(kernels, device)
        self.signature = inspect.Signature(
            [
                inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD)
                for name in host.parameters
            ]
        )
        module = link(host.code, host.trampolines)
        addresses = self._callbacks((*_TVM_FFI_SYMBOLS, *host.symbols))
        module.get_function("bind")(*(ctypes.c_void_p(addresses[name]) for name in host.symbols))
        function = module.get_function(host.function)

        def call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
            bound = self.signature.bind(*args, **kwargs)
            return function(*(_tvm_ffi_value(value) for value in bound.arguments.values()))

        self._call = call


def _tvm_ffi_value(value: Any) -> Any:
    from tvm_ffi.utils.unpack_dataclass import unpack_dataclass_to_tuple

    if dataclasses.is_dataclass(value):
        value = unpack_dataclass_to_tuple(value)
    return on_device(value)


def visible_signature(compiled: Any, symbols: HostSymbols) -> inspect.Signature:
    """What a caller passes: the run-time parameters without streams of the environment."""
    signature: inspect.Signature = compiled.execution_args.signature
    if not symbols.usage:
        return signature
    visible = [
        parameter
        for name, parameter in signature.parameters.items()
        if re.search(rf"[(,] ?{name}: ", symbols.usage)
    ]
    return signature.replace(parameters=visible)


def host_symbols(module: Any) -> HostSymbols:
    defined: list[str] = []
    declared: list[str] = []
    usage = ""
    with module.context:
        for item in module.body.operations:
            operation = item.operation
            if operation.name == "llvm.func":
                name = operation.attributes["sym_name"].value
                has_body = len(operation.regions[0].blocks) > 0
                (defined if has_body else declared).append(name)
            elif operation.name == "llvm.mlir.global" and "value" in operation.attributes:
                match = _USAGE.match(str(operation.attributes["value"]).strip('"'))
                usage = match[1] if match else usage
    return HostSymbols(frozenset(defined), tuple(declared), usage)
