"""A CPU emulator of compiled CuTe DSL kernels: runs their PTX on CPU tensors, without a GPU."""

from .arguments import DeviceView
from .errors import (
    AddressError,
    BarrierError,
    DeadlockError,
    EmulationError,
    InvalidDescriptor,
    UnknownInstruction,
)
from .run import EmulationRun, LaunchInfo, launch

__all__ = [
    "AddressError",
    "BarrierError",
    "DeadlockError",
    "DeviceView",
    "EmulationError",
    "EmulationRun",
    "InvalidDescriptor",
    "LaunchInfo",
    "UnknownInstruction",
    "launch",
]
