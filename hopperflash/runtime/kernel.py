"""A compiled kernel as bytes, and the function it becomes in a process."""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

from hopperflash.emulator import HostObject, link
from hopperflash.runtime.dsl import dsl_runtime


@dataclass(frozen=True)
class KernelBinary:
    """All that is needed to run a kernel on a GPU or in the emulator, without its compiler."""

    host: HostObject
    ptx: str
    cubin: bytes

    @property
    def entry(self) -> str:
        """The kernel's own name, which holds its dtype, head dims, tile and mask; "" in no PTX."""
        found = re.search(r"\.entry\s+(\w+)", self.ptx)
        return found[1] if found else ""


class Artifacts(NamedTuple):
    """The texts and binaries of a kernel, by the names the compiler gives them."""

    PTX: str
    CUBIN: bytes


class Kernel:
    """Calls a `KernelBinary` with torch tensors in the order of the plan's operands.

    A GPU's kernels are linked on the first call; the emulator reads `host_object` and `__ptx__`.
    """

    def __init__(self, binary: KernelBinary) -> None:
        self.host_object = binary.host
        self.artifacts = Artifacts(binary.ptx, binary.cubin)
        self.__ptx__ = binary.ptx
        self._function: Any = None

    def __call__(self, *operands: Any) -> None:
        """Launches on the stream that torch has current on the operands' device."""
        function = self._function
        if function is None:
            function = self._linked()
        function(*operands)

    def _linked(self) -> Any:
        # Two threads may both link it, which is harmless: each function loads what it launches.
        # The object's CUDA calls are found among the symbols of the process.
        ctypes.CDLL(str(dsl_runtime().path), ctypes.RTLD_GLOBAL)
        self._function = link(self.host_object.code).get_function(self.host_object.function)
        return self._function
