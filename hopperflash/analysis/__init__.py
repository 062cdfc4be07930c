"""What the compiler made of a kernel: resources and machine code, without a GPU."""

from hopperflash.analysis.cubin import KernelResources, inspect_cubin
from hopperflash.analysis.sass import (
    DisassemblerMissing,
    SassInstruction,
    SassListing,
    find_nvdisasm,
)

__all__ = [
    "DisassemblerMissing",
    "KernelResources",
    "SassInstruction",
    "SassListing",
    "find_nvdisasm",
    "inspect_cubin",
]
