"""`KernelSpec` to an executable: the only importer of kernels, the only caller of cute.compile."""

from __future__ import annotations

import importlib
import tempfile
from threading import Lock
from typing import Any

from hopperflash.errors import CompileError
from hopperflash.plan import KernelSpec

_executables: dict[KernelSpec, Any] = {}
# MLIR state is per process and unguarded: compiling from two threads crashes.
_compiler = Lock()


def compile_kernel(spec: KernelSpec) -> Any:
    """The compiled function of a spec, from memory after the first time.

    A `cutlass` TVM-FFI function: call it with torch tensors in the order of the plan's operands.
    It keeps its PTX and cubin (`artifacts.PTX`, `artifacts.CUBIN`) for the emulator and the
    resource reports. Raises `CompileError` with the compiler's words.
    """
    executable = _executables.get(spec)
    if executable is None:
        with _compiler:
            executable = _executables.get(spec) or _compile(spec)
            _executables[spec] = executable
    return executable


def _compile(spec: KernelSpec) -> Any:
    import cutlass.cute as cute

    kernel_class = getattr(importlib.import_module(spec.ref.module), spec.ref.name)
    kernel = kernel_class(spec.config, spec.signature, spec.dependent)
    with tempfile.TemporaryDirectory(prefix="hopperflash-") as dump_dir:
        # A folder of its own: the compiler reads its PTX back from a file whose name different
        # kernels share.
        options = (
            f"--gpu-arch {spec.target} --opt-level 3 --enable-tvm-ffi"
            f" --keep-ptx --keep-cubin --dump-dir {dump_dir}"
        )
        try:
            return cute.compile(kernel, *kernel.fake_arguments(), options=options)
        except Exception as error:
            raise CompileError(
                f"{spec.ref.name} did not compile for {spec.target}:", [str(error)]
            ) from error
