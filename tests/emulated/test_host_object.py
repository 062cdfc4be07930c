"""Exported host code does what the compiled function's does, linked instead of compiled."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("cutlass")

import cutlass
import torch
import tvm_ffi

from hopperflash.emulator import DeviceView, EmulationError, HostObject, export_host, launch
from hopperflash.emulator.cuda_runtime import KernelLaunch
from hopperflash.emulator.run import _program_of
from hopperflash.runtime.kernel import Kernel, KernelBinary
from tests.support.sample_kernels import TmaCopy, compile_kernel, fake_matrix

pytestmark = pytest.mark.emulated


class Loaded:
    """What the emulator asks of a kernel that comes without its compiler."""

    def __init__(self, host: HostObject, ptx: str) -> None:
        self.host_object, self.__ptx__ = host, ptx


@pytest.fixture(scope="module")
def compiled() -> Any:
    return compile_kernel(TmaCopy((64, 64), "SW128"), *[fake_matrix(cutlass.Float16)] * 2)


@pytest.fixture(scope="module")
def loaded(compiled: Any) -> Loaded:
    return Loaded(export_host(compiled), compiled.__ptx__)


def launches(kernel: Any, *operands: torch.Tensor) -> list[KernelLaunch]:
    captured: list[KernelLaunch] = []
    _program_of(kernel).host.run(operands, {}, captured.append)
    # The second half of a tensor map means nothing: it is what the stack held.
    return [replace(one, parameters=tuple(p[:64] for p in one.parameters)) for one in captured]


def test_launches_are_those_of_the_compiled_function(compiled, loaded):
    src, dst = torch.empty(2, 90, 136, dtype=torch.float16).unbind()
    assert launches(loaded, src, dst) == launches(compiled, src, dst) != []


def test_results_and_counters_are_those_of_the_compiled_function(compiled, loaded):
    src = torch.randn(100, 136).half()
    runs = []
    for kernel in (compiled, loaded):
        dst = torch.full_like(src, torch.nan)
        runs.append(launch(kernel, src, dst))
        assert torch.equal(dst, src)
    assert runs[0].counters == runs[1].counters
    assert runs[0].launches == runs[1].launches


def test_arguments_are_checked_by_the_same_code(compiled, loaded):
    src, wrong = torch.empty(64, 64, dtype=torch.float16), torch.empty(64, 64)
    messages = []
    for kernel in (compiled, loaded):
        with pytest.raises(ValueError, match="Mismatched") as refused:
            launch(kernel, src, wrong)
        messages.append(str(refused.value))
    assert messages[0] == messages[1]
    assert re.search("dtype|float16", messages[0])


def test_an_error_inside_a_launch_comes_out(loaded):
    def refuse(captured: KernelLaunch) -> None:
        raise EmulationError("not this one")

    src = torch.empty(64, 64, dtype=torch.float16)
    with pytest.raises(EmulationError, match="not this one"):
        _program_of(loaded).host.run((src, src.clone()), {}, refuse)
    assert launches(loaded, src, src.clone())


def test_functions_without_tvm_ffi_are_not_exported():
    plain = compile_kernel(
        TmaCopy((64, 64), "SW128"), *[fake_matrix(cutlass.Float16)] * 2, tvm_ffi=False
    )
    with pytest.raises(EmulationError, match="enable-tvm-ffi"):
        export_host(plain)


def test_host_code_runs_on_any_cpu_of_the_architecture(compiled):
    """No function keeps the CPU at hand as its target."""
    export_host(compiled)
    text = str(compiled.ir_module)
    functions = re.findall(r"llvm\.func [^\n]*\{$", text, re.MULTILINE)
    assert functions
    assert [line for line in functions if "target_cpu" not in line] == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, which would run it")
def test_on_a_gpu_the_cuda_runtime_is_the_real_one(compiled, loaded):
    """What a GPU needs is linked, up to the driver that is not there."""
    kernel = Kernel(KernelBinary(loaded.host_object, compiled.__ptx__, b""))
    src = torch.empty(64, 64, dtype=torch.float16)
    with pytest.raises(ValueError, match="Mismatched Tensor"):
        kernel(src, src)
    with pytest.raises(RuntimeError, match=r"cudaError(InsufficientDriver|NoDevice)"):
        kernel(*(tvm_ffi.from_dlpack(DeviceView(src)) for _ in range(2)))
