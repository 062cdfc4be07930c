"""Makes torch and CuTe DSL believe that CPU tensors are on a GPU, for public code run unchanged.

For scripts in a process of their own: what is replaced here stays replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from cutlass import testing
from cutlass._mlir import ir
from cutlass.base_dsl.dsl import BaseDSL
from cutlass.base_dsl.jit_executor import JitCompiledFunction
from cutlass.cute import runtime
from cutlass.cute import testing as cute_testing
from cutlass.cutlass_dsl import tvm_ffi_provider  # noqa: F401  # its compiled functions too
from cutlass.utils import HardwareInfo
from torch.overrides import TorchFunctionMode

from hopperflash.emulator import DeviceView, EmulationRun, launch

CLUSTERS = 3
"""What host code is told that a device runs at once: persistent kernels loop over their tiles."""


class _OnTheCpu(TorchFunctionMode):
    """Tensors asked for on a GPU are made on the CPU."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.Tensor.cuda:
            # A copy, as a transfer makes one.
            return args[0].clone()
        keywords = dict(kwargs or {})
        if "device" in keywords:
            keywords["device"] = "cpu"
        return function(*("cpu" if _is_gpu(a) else a for a in args), **keywords)


def _is_gpu(value: Any) -> bool:
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return isinstance(value, str) and value.partition(":")[0] == "cuda"


def pose_as_gpu(major: int, minor: int) -> None:
    """torch reports a device of this compute capability, and CPU tensors pass for its tensors."""
    stream = SimpleNamespace(cuda_stream=0, synchronize=lambda: None)
    device = SimpleNamespace(multi_processor_count=132, major=major, minor=minor, name="emulated")
    replaced: dict[str, Any] = {
        "is_available": lambda: True, "current_device": lambda: 0, "device_count": lambda: 1,
        "get_device_properties": lambda *_: device,
        "get_device_capability": lambda *_: (major, minor), "synchronize": lambda *_: None,
        "current_stream": lambda *_: stream, "default_stream": lambda *_: stream,
        "Stream": lambda *_, **__: stream, "stream": lambda *_: nullcontext(),
        "Event": lambda **_: SimpleNamespace(record=lambda *_: None, elapsed_time=lambda _: 1.0),
    }  # fmt: skip
    for name, value in replaced.items():
        setattr(torch.cuda, name, value)
    torch.Tensor.is_cuda = property(lambda _: True)
    _OnTheCpu().__enter__()
    HardwareInfo.__init__ = lambda self, *_: None
    HardwareInfo.get_max_active_clusters = lambda *_, **__: CLUSTERS
    # Time is not emulated.
    testing.benchmark = cute_testing.benchmark = lambda *_, **__: 1.0


def emulate_everything(run: EmulationRun, schedule: str) -> None:
    """From now on compiled functions, and functions called directly, run in the emulator."""
    launch_with(partial(launch, run=run, schedule=schedule))


def launch_with(launch: Callable[..., Any]) -> None:
    """From now on `launch` is called with compiled functions and their arguments, and as `buffers`
    with the tensors that kernels may reach through pointers."""
    seen: dict[str, Any] = {}
    make = runtime._Tensor.__init__

    def init(self: Any, tensor: Any, *args: Any, **options: Any) -> None:
        if isinstance(tensor, torch.Tensor):
            # Kernels may reach it through a pointer.
            seen[f"tensor {len(seen)}"] = tensor
            tensor = DeviceView(tensor)
        make(self, tensor, *args, **options)

    def execute(compiled: Any, *args: Any, **keywords: Any) -> None:
        launch(compiled, *args, buffers=seen, **keywords)

    call_directly = BaseDSL._func

    def call(self: Any, body: Any, *args: Any, **keywords: Any) -> Any:
        tracing = ir.Context.current is not None and ir.InsertionPoint.current is not None
        if tracing or "compile_only" in keywords:
            return call_directly(self, body, *args, **keywords)
        compiled = call_directly(self, body, *args, compile_only=True, **keywords)
        values = compiled.execution_args.get_rectified_args_from_original_args(args, keywords)
        return execute(compiled, *values)

    runtime._Tensor.__init__ = init
    BaseDSL._func = call
    for kind in _and_below(JitCompiledFunction):
        kind.__call__ = execute


def _and_below(kind: type) -> Iterator[Any]:
    yield kind
    for below in kind.__subclasses__():
        yield from _and_below(below)
