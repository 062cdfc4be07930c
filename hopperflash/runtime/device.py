"""Which architecture a call is planned for."""

from __future__ import annotations

import torch

from hopperflash.errors import UnsupportedProblem
from hopperflash.plan import ArchSpec, arch_of, arch_of_capability
from hopperflash.runtime import emulation


def target_arch(device: torch.device, arch: str | None = None) -> ArchSpec:
    """The named arch; else that of the device, where CPU tensors follow the active `emulate`.

    Raises `InvalidArgument` for an unknown arch or GPU, `UnsupportedProblem` for a device that is
    neither a CPU nor a CUDA GPU.
    """
    if arch is not None:
        return arch_of(arch)
    if device.type == "cuda":
        return arch_of_capability(torch.cuda.get_device_capability(device))
    if device.type == "cpu":
        session = emulation.active()
        return arch_of("cpu") if session is None else session.arch
    raise UnsupportedProblem(f"tensors on {device}: there are backends for cuda and cpu")
