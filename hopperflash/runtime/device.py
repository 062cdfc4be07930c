"""Which architecture a call is planned for."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch

from hopperflash.plan import ArchSpec, arch_of, arch_of_capability
from hopperflash.runtime import emulation


def target_arch(
    device: torch.device, arch: str | None = None, backend: str | None = None
) -> ArchSpec:
    """The named arch; else that of the device, with as many SMs as it has.

    CPU tensors follow the active `emulate`, unless the cpu backend is asked for.

    Raises `InvalidArgument` for an unknown arch or GPU.
    """
    if arch is not None:
        return arch_of(arch)
    if device.type == "cuda":
        return _arch_of_gpu(device)
    session = emulation.session_of(device)
    return arch_of("cpu") if session is None or backend == "cpu" else session.arch


def _arch_of_gpu(device: torch.device) -> ArchSpec:
    properties = torch.cuda.get_device_properties(device)
    capability = (properties.major, properties.minor)
    return _of_part(capability, properties.multi_processor_count, properties.L2_cache_size)


@lru_cache
def _of_part(capability: tuple[int, int], sms: int, l2_bytes: int) -> ArchSpec:
    return replace(arch_of_capability(capability), sms=sms, l2_bytes=l2_bytes)
