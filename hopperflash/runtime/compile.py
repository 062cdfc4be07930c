"""`KernelSpec` to a kernel: the only importer of kernels, the only caller of cute.compile."""

from __future__ import annotations

import importlib
import os
import tempfile
from threading import Lock

from hopperflash.emulator import export_host
from hopperflash.errors import CompileError
from hopperflash.plan import KernelSpec
from hopperflash.runtime import cache
from hopperflash.runtime.kernel import Kernel, KernelBinary

_WAY_OUT = "`hopperflash doctor` says whether the compiler works here, and what mends it"

_kernels: dict[KernelSpec, Kernel] = {}
# MLIR state is per process and unguarded: compiling from two threads crashes.
_compiler = Lock()


def compile_kernel(spec: KernelSpec) -> Kernel:
    """The kernel of a spec: from memory, from the cache on disk, or compiled and kept in both.

    Call it with torch tensors in the order of the plan's operands. It has its PTX and cubin
    (`artifacts.PTX`, `artifacts.CUBIN`) for the emulator and the resource reports. The compiler is
    imported only where something compiles. Raises `CompileError` with the compiler's words.
    """
    kernel = _kernels.get(spec)
    if kernel is None:
        with _compiler:
            kernel = _kernels.get(spec) or Kernel(cache.obtain(spec, _compile))
            _kernels[spec] = kernel
    return kernel


def compile_anew(spec: KernelSpec) -> Kernel:
    """The kernel of a spec, compiled whatever is cached, and not kept: a trial of the compiler."""
    with _compiler:
        return Kernel(_compile(spec))


def warm_kernel(spec: KernelSpec) -> bool:
    """Puts a kernel into the cache on disk; whether it had to be compiled for that."""
    compiled = []

    def compile_here(spec: KernelSpec) -> KernelBinary:
        compiled.append(spec)
        return _compile(spec)

    with _compiler:
        cache.obtain(spec, compile_here)
    return bool(compiled)


def _compile(spec: KernelSpec) -> KernelBinary:
    try:
        return _compiled(spec)
    except Exception as error:
        # What a report of it needs: the compiler may name neither the kernel nor its own error.
        reasons = [f"{type(error).__name__}: {error}", f"the kernel: {spec}", _WAY_OUT]
        headline = f"{spec.ref.name} did not compile for {spec.target}:"
        raise CompileError(headline, reasons) from error


def _compiled(spec: KernelSpec) -> KernelBinary:
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
        compiled = cute.compile(kernel, *kernel.fake_arguments(), options=options)
    return KernelBinary(export_host(compiled), compiled.__ptx__, compiled.__cubin__)


def _after_fork() -> None:
    """A thread of the parent may have held the lock; that thread is not in the child."""
    global _compiler
    _compiler = Lock()


os.register_at_fork(after_in_child=_after_fork)
