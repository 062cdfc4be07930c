"""Host code as relocatable objects: exported once, then linked and run without the compiler.

The object of a compiled function calls the CUDA runtime by name. On a GPU the linker finds those
names in the DSL's runtime library; to be emulated, it is linked with a second object that defines
each of them as a jump through a table, which `bind` fills with the emulator's callbacks.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any


@dataclass(frozen=True)
class HostObject:
    """A TVM-FFI host function, its cubin inside, for any CPU of the architecture it was made on."""

    function: str
    """Its TVM-FFI name."""
    parameters: tuple[str, ...]
    """What a caller passes, without streams of the environment."""
    code: bytes
    """Relocatable object that leaves CUDA runtime symbols undefined."""
    trampolines: bytes
    """Relocatable object that defines them, for the emulator."""
    symbols: tuple[str, ...]
    """Their names, in the order in which `bind` of `trampolines` takes addresses."""


def link(*objects: bytes) -> Any:
    """A `tvm_ffi.Module` of the linked objects; symbols they lack are those of the process."""
    return _session().load_module(objects)


@lru_cache(maxsize=1)
def _session() -> Any:
    from tvm_ffi_orcjit import ExecutionSession

    # Without the ORC runtime no destructor of an object runs: the kernels stay loaded until the
    # process ends, as they do for the compiler's own functions.
    return ExecutionSession(orc_rt=None)
