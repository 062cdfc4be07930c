"""What a machine has: versions, GPUs, CUDA generations, the cache, variables."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hopperflash import env, plan
from hopperflash.analysis import DisassemblerMissing, find_nvdisasm
from hopperflash.cli import trials
from hopperflash.cli.output import Stages
from hopperflash.cli.requirements import NEEDED, PEERS, unmet, versions
from hopperflash.cli.trials import Ability
from hopperflash.errors import InvalidArgument
from hopperflash.runtime import dsl
from hopperflash.runtime.generations import Finding, chosen_generation, judge

_DRIVER_FILE = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Gpu:
    """A GPU that the driver shows; `arch` is what kernels are compiled for, "" where none is."""

    device: str
    name: str
    capability: tuple[int, int]
    multiprocessors: int
    memory_bytes: int
    arch: str
    backend: str


@dataclass(frozen=True)
class Cuda:
    """CUDA generations: installed for the compiler, taken by it, torch's; and the driver's."""

    installed: tuple[int, ...]
    compiler: int | None
    torch: str | None
    driver: str | None
    driver_release: str | None
    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class CacheState:
    """The compile cache; `trouble` is why nothing is kept in it or read from its seed."""

    enabled: bool
    folder: str
    entries: int
    bytes: int
    limit_bytes: int
    seed: str | None
    seed_entries: int
    trouble: tuple[str, ...]


@dataclass(frozen=True)
class Diagnosis:
    """What was found; no version where something is not installed."""

    python: str
    executable: str
    platform: str
    cpus: int
    versions: dict[str, str | None]
    nvdisasm: str | None
    unmet_requirements: tuple[str, ...]
    cuda: Cuda
    gpus: tuple[Gpu, ...]
    cache: CacheState
    variables: dict[str, str]
    unknown_variables: tuple[str, ...]
    abilities: tuple[Ability, ...]

    @property
    def failures(self) -> list[Ability]:
        """What should work here and does not."""
        return [ability for ability in self.abilities if ability.expected and ability.ok is False]


def diagnose(progress: Stages, tried: bool) -> Diagnosis:
    """Looks around; where `tried` also compiles a kernel and computes on the CPU and every GPU."""
    progress.enter("loading torch")
    gpus, torch_cuda = _gpus(), _torch_cuda()
    cuda = _cuda(torch_cuda)
    progress.enter("trying what works" if tried else "looking around")
    return Diagnosis(
        python=platform.python_version(),
        executable=sys.executable,
        platform=platform.platform(),
        cpus=len(os.sched_getaffinity(0)),
        versions=versions((*NEEDED, *PEERS)),
        nvdisasm=_nvdisasm(),
        unmet_requirements=tuple(unmet(NEEDED)),
        cuda=cuda,
        gpus=gpus,
        cache=_cache(),
        variables=env.relevant(),
        unknown_variables=tuple(env.unknown()),
        abilities=tuple(_abilities(gpus, cuda, tried)),
    )


def _abilities(gpus: tuple[Gpu, ...], cuda: Cuda, tried: bool) -> Iterator[Ability]:
    yield trials.compiler(tried)
    yield from trials.computations(tried)
    for gpu in gpus:
        yield _ability_of(gpu, cuda, tried)


def _ability_of(gpu: Gpu, cuda: Cuda, tried: bool) -> Ability:
    """Whether a GPU computes; one that no backend is made for is not expected to."""
    try:
        arch = plan.arch_of_capability(gpu.capability)
    except InvalidArgument as unknown:
        return Ability(gpu.device, False, unknown.headline, expected=False)
    reasons = [finding.text for finding in cuda.findings if finding.breaks == "gpu"]
    if not reasons and not _torch_sees(gpu):
        reasons = ["torch does not see it"]
    if reasons:
        return Ability(gpu.device, False, "; ".join(reasons))
    return trials.on_device(gpu.device, gpu.device, arch, tried)


def _torch_sees(gpu: Gpu) -> bool:
    import torch

    return int(gpu.device.removeprefix("cuda:")) < torch.cuda.device_count()


def _nvdisasm() -> str | None:
    """Version and place of the disassembler, which reports of machine code need."""
    try:
        path = find_nvdisasm()
    except DisassemblerMissing:
        return None
    told = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    version = re.search(r"\bV(\d[\d.]*)", told.stdout)
    return f"{version[1] if version else 'of unknown version'} ({path})"


def _torch_cuda() -> str | None:
    """The CUDA version that torch is built for."""
    try:
        import torch
    except (ImportError, OSError):
        return None
    version: str | None = torch.version.cuda
    return version


def _cuda(torch_cuda: str | None) -> Cuda:
    installed, driver = frozenset(dsl.installed_libraries()), dsl.driver_version()
    torch_major = int(torch_cuda.split(".")[0]) if torch_cuda else None
    return Cuda(
        installed=tuple(sorted(installed)),
        compiler=chosen_generation(installed, driver[0] if driver else None),
        torch=torch_cuda,
        driver="{}.{}".format(*driver) if driver else None,
        driver_release=_driver_release(),
        findings=judge(installed, torch_major, driver, dsl.dsl_release()),
    )


def _driver_release() -> str | None:
    """Such as 575.51.03, from the kernel module."""
    try:
        match = re.search(r"\d{3,}\.\d+(\.\d+)?", _DRIVER_FILE.read_text())
    except OSError:
        return None
    return match[0] if match else None


def _gpus() -> tuple[Gpu, ...]:
    """By the driver, whatever torch sees of them; nothing is allocated on them."""
    try:
        from cuda.bindings import driver

        _checked(driver.cuInit(0))
        return tuple(_gpu(driver, index) for index in range(_checked(driver.cuDeviceGetCount())))
    except (ImportError, RuntimeError):
        return ()


def _gpu(driver: Any, index: int) -> Gpu:
    device = _checked(driver.cuDeviceGet(index))
    attributes = driver.CUdevice_attribute
    major, minor, multiprocessors = (
        _checked(driver.cuDeviceGetAttribute(attribute, device))
        for attribute in (
            attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
            attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
            attributes.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
        )
    )
    name, arch, backend = f"cuda:{index}", "", ""
    try:
        spec = plan.arch_of_capability((major, minor))
        taken = plan.make_plan(trials.small_problem(name), spec)
        arch, backend = spec.name, taken.backend
    except InvalidArgument:
        pass
    return Gpu(
        device=name,
        name=_checked(driver.cuDeviceGetName(256, device)).decode().strip("\0 "),
        capability=(major, minor),
        multiprocessors=multiprocessors,
        memory_bytes=_checked(driver.cuDeviceTotalMem(device)),
        arch=arch,
        backend=backend,
    )


def _checked(answer: tuple[Any, ...]) -> Any:
    """The value of a driver call; `RuntimeError` where it failed."""
    error, *values = answer
    if int(error):
        raise RuntimeError(error.name)
    return values[0] if values else None


def _cache() -> CacheState:
    from hopperflash.runtime.cache import own_store, seed_store, size_limit, trust

    store, seed, wanted = own_store(), seed_store(), env.cache_seed()
    entries = store.entries()
    trouble = [store.distrust() or trust.unwritable(store.folder)]
    if seed is not None:
        trouble.append(seed.distrust())
    elif wanted is not None:
        trouble.append(f"{wanted} is no folder: {env.CACHE_SEED} names it")
    enabled, limit = True, 0
    try:
        enabled, limit = env.cache_enabled(), size_limit()
    except InvalidArgument as refused:
        trouble.append(refused.headline)
    return CacheState(
        enabled=enabled,
        folder=str(store.folder),
        entries=len(entries),
        bytes=sum(entry.bytes for entry in entries),
        limit_bytes=limit,
        seed=str(wanted) if wanted else None,
        seed_entries=len(seed.entries()) if seed is not None else 0,
        trouble=tuple(reason for reason in trouble if reason),
    )
