"""What the compiler made of a kernel: resources and machine code, without a GPU."""

from hopperflash.analysis.cubin import KernelResources, inspect_cubin
from hopperflash.analysis.kernel_report import KernelReport, report
from hopperflash.analysis.sass import (
    DisassemblerMissing,
    SassInstruction,
    SassListing,
    disassembly,
    find_nvdisasm,
)

__all__ = [
    "DisassemblerMissing",
    "KernelReport",
    "KernelResources",
    "SassInstruction",
    "SassListing",
    "disassembly",
    "find_nvdisasm",
    "inspect_cubin",
    "report",
]
