"""What a GPU runs at while it is timed, by NVML; nothing is claimed where that cannot be asked."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Clocks:
    """Extremes over the turns of one call: MHz of the SMs and of the memory, degrees, watts."""

    sm_mhz: tuple[int, int]
    memory_mhz: tuple[int, int]
    celsius: tuple[int, int]
    watts: tuple[int, int]


class ClockReader:
    """Reads one GPU; `absent` says why it does not."""

    def __init__(self, device: str) -> None:
        self._nvml: Any = None
        self._handle: Any = None
        self.absent = ""
        self._seen: dict[str, list[tuple[int, ...]]] = {}
        if device == "cpu":
            self.absent = "a CPU's are not read"
            return
        try:
            self._nvml = nvml = importlib.import_module("pynvml")
            nvml.nvmlInit()
            uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
            self._handle = nvml.nvmlDeviceGetHandleByUUID(uuid.encode())
            self._read()
        except ImportError:
            self.absent = "nvidia-ml-py is not installed"
        except Exception as refused:  # NVMLError, of a module that may not be there
            self._nvml, self.absent = None, f"NVML refuses: {refused}"

    def note(self, name: str) -> None:
        """What the GPU runs at now, for `name`."""
        if self._nvml is not None:
            self._seen.setdefault(name, []).append(self._read())

    def take(self, name: str) -> Clocks | None:
        """Extremes of what was noted for `name`, which is then forgotten."""
        seen = self._seen.pop(name, None)
        if seen is None:
            return None
        return Clocks(*((min(column), max(column)) for column in zip(*seen, strict=True)))

    def _read(self) -> tuple[int, int, int, int]:
        nvml, handle = self._nvml, self._handle
        return (
            nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
            nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            nvml.nvmlDeviceGetPowerUsage(handle) // 1000,
        )
