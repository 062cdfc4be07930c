"""What the emulator takes for granted about CuTe DSL: it fails readably when a release changes it.

Each test names the assumption; the fix is in the module that its message points to.
"""

from __future__ import annotations

import struct
from importlib.metadata import version
from typing import Any

import pytest

pytest.importorskip("cutlass")

import cutlass
import torch

from hopperflash.emulator.cuda_runtime import CudaRuntime, DeviceFacts
from hopperflash.emulator.errors import UnknownInstruction
from hopperflash.emulator.host import _TVM_FFI_SYMBOLS, _UNLOAD, host_symbols
from hopperflash.emulator.operations import decode
from hopperflash.emulator.ptx_parser import parse_module
from hopperflash.emulator.run import _program_of
from tests.support.conformance_kernels import AmpereGemm, MulticastGemm
from tests.support.sample_kernels import SmallGemm, TmaCopy, compile_kernel, fake_matrix

pytestmark = [pytest.mark.emulated, pytest.mark.compile]

DSL = f"nvidia-cutlass-dsl {version('nvidia-cutlass-dsl')}"
# Error paths of TVM-FFI, and what it needs of its own library.
KNOWN_ELSEWHERE = {
    *_TVM_FFI_SYMBOLS, _UNLOAD, "CuteDSLRT_TVMFFISetRaisedCudaError", "cuda_dialect_get_error_name",
}  # fmt: skip


def gemm_fakes(dtype: Any = cutlass.Float16) -> list[Any]:
    return [fake_matrix(dtype), fake_matrix(dtype), fake_matrix(cutlass.Float32)]


@pytest.fixture(scope="module", params=["tvm_ffi", "plain"])
def copy(request: pytest.FixtureRequest) -> Any:
    fakes = [fake_matrix(cutlass.Float16)] * 2
    return compile_kernel(TmaCopy((64, 64), "SW128"), *fakes, tvm_ffi=request.param == "tvm_ffi")


def test_compiled_functions_have_what_the_emulator_reads(copy: Any) -> None:
    missing = [name for name in ("ir_module", "function_name", "execution_args", "__ptx__")
               if getattr(copy, name, None) is None]  # fmt: skip
    assert not missing, f"{DSL}: a compiled function lacks {missing}; see emulator/host.py, run.py"


def test_every_host_symbol_is_answered(copy: Any) -> None:
    symbols = host_symbols(copy.ir_module)
    answered = set(CudaRuntime({}, DeviceFacts.of_target("sm_90a")).callbacks) | KNOWN_ELSEWHERE
    runtime = {name for name in symbols.declared if name.startswith(("_cu", "cuda_", "TVMFFI"))}
    unknown = sorted(runtime - answered)
    assert not unknown, (
        f"{DSL}: host code declares {unknown}, which emulator/cuda_runtime.py does not answer; a"
        " symbol that only error paths call may join KNOWN_ELSEWHERE here"
    )
    entry = {f"__tvm_ffi_{copy.function_name}", f"_mlir_ciface_{copy.function_name}"}
    assert entry & symbols.defined, f"{DSL}: host code defines none of {sorted(entry)}"


def test_tensor_maps_have_the_known_bits() -> None:
    copy = compile_kernel(TmaCopy((64, 64), "SW128"), *[fake_matrix(cutlass.Float16)] * 2)
    src, captured = torch.empty(90, 136, dtype=torch.float16), []
    _program_of(copy).host.run((src, src), {}, captured.append)
    raw = captured[0].parameters[0][:64]
    control = 2 | 1 << 4 | 6 << 7 | 3 << 13 | 2 << 17
    strides = (136 * 2 >> 4, 0, 0, 0, 0)
    sizes = (136 - 1, 90 - 1, 0, 0, 0)
    expected = struct.pack("<QI5I5I", src.data_ptr(), control, *strides, *sizes)
    expected += bytes(3) + bytes([63, 63, 0, 0, 0]) + bytes(4)
    differing = [i for i, (a, b) in enumerate(zip(raw, expected, strict=True)) if a != b]
    assert not differing, (
        f"{DSL}: bytes {differing} of a tensor map are not as emulator/tensor_map.py reads them:\n"
        f"  found    {raw.hex(' ', 4)}\n  expected {expected.hex(' ', 4)}"
    )


SAMPLES = {
    "sm_90a": [
        (TmaCopy((64, 64), "SW128"), [cutlass.Float16]),
        (SmallGemm(32, 64), gemm_fakes),
        (MulticastGemm(2), gemm_fakes),
    ],
    "sm_80": [(AmpereGemm(), gemm_fakes)],
}


@pytest.mark.parametrize("target", SAMPLES)
def test_the_ptx_dialect_is_known(target: str) -> None:
    unknown = set()
    for kernel, fakes in SAMPLES[target]:
        tensors = fakes() if callable(fakes) else [fake_matrix(cutlass.Float16)] * 2
        ptx = compile_kernel(kernel, *tensors, arch=target).__ptx__
        module = parse_module(ptx)
        assert module.target == target
        major = int(module.version.split(".")[0])
        assert major in (8, 9), f"{DSL}: PTX {module.version}; look for new forms"
        for entry in module.kernels.values():
            for instruction in entry.instructions:
                try:
                    decode(instruction)
                except UnknownInstruction as refused:
                    unknown.add(str(refused))
    listed = "\n  ".join(sorted(unknown))
    assert not unknown, f"{DSL} emits instructions that the opcode tables lack:\n  {listed}"
