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
from .host_export import export_host
from .host_object import HostObject, link
from .run import EmulationRun, LaunchInfo, launch

__all__ = [
    "AddressError",
    "BarrierError",
    "DeadlockError",
    "DeviceView",
    "EmulationError",
    "EmulationRun",
    "HostObject",
    "InvalidDescriptor",
    "LaunchInfo",
    "UnknownInstruction",
    "export_host",
    "launch",
    "link",
]
