"""Which architecture a call is planned for."""

from __future__ import annotations

import torch

from hopperflash.plan import ArchSpec, arch_of, arch_of_capability
from hopperflash.runtime import emulation


def target_arch(
    device: torch.device, arch: str | None = None, backend: str | None = None
) -> ArchSpec:
    """The named arch; else that of the device.

    CPU tensors follow the active `emulate`, unless the cpu backend is asked for.

    Raises `InvalidArgument` for an unknown arch or GPU.
    """
    if arch is not None:
        return arch_of(arch)
    if device.type == "cuda":
        return arch_of_capability(torch.cuda.get_device_capability(device))
    session = emulation.session_of(device)
    return arch_of("cpu") if session is None or backend == "cpu" else session.arch
