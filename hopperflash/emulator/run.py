"""`launch`: execute a compiled CuTe DSL function on CPU tensors, and what an execution records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

from threadpoolctl import threadpool_limits

from .arguments import memory_regions
from .counters import Counters
from .cuda_runtime import DeviceFacts, Dim3, KernelLaunch, KernelSignature
from .errors import EmulationError
from .host import CompiledHost, HostProgram, LinkedHost
from .machine import Launch, Selection, run_kernel
from .memory import GlobalMemory
from .previous_grids import PreviousGrids
from .ptx_ir import Kernel, Module
from .ptx_parser import parse_module
from .report import render

Progress = Callable[[int, int], None]

_CACHE = "_hopperflash_emulation"


@dataclass(frozen=True)
class LaunchInfo:
    """One kernel launch as the host code configured it."""

    kernel_name: str
    grid: Dim3
    block: Dim3
    cluster: Dim3
    shared_bytes: int
    """Static and dynamic shared memory of a CTA."""
    registers_set: tuple[int, ...] = ()
    """Register counts that warps set for themselves (setmaxnreg)."""
    ctas_run: int = 0
    """CTAs that were executed: fewer than the grid has where `ctas` picks some."""


@dataclass
class EmulationRun:
    """What was executed; several calls may add to one run."""

    launches: list[LaunchInfo] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)
    """Totals over all launches; see `Counters` for the names."""
    kernels: dict[str, dict[str, int]] = field(default_factory=dict)
    """The same for each kernel by its name."""
    host_calls: Counter[str] = field(default_factory=Counter)
    """How often host code called each function of the CUDA runtime."""
    hazards: list[str] = field(default_factory=list)
    """Races and missing fences that were observed; empty where clean."""
    previous: PreviousGrids = field(default_factory=PreviousGrids, repr=False)
    """What launches that may still be running have touched, see `previous_grids`."""
    printed: str = ""
    """What kernels printed; it went to stdout as well."""

    def add(self, info: LaunchInfo, counters: Mapping[str, int]) -> None:
        """Appends a launch and adds its counters."""
        self.launches.append(info)
        for totals in (self.counters, self.kernels.setdefault(info.kernel_name, {})):
            for name, value in counters.items():
                totals[name] = totals.get(name, 0) + value

    def report(self) -> str:
        """Launches, counters by kernel and hazards as text tables."""
        return render(self)


def launch(
    compiled: Any,
    *args: Any,
    schedule: str = "lazy",
    seed: int = 0,
    hazards: str = "full",
    ctas: Selection = None,
    progress: Progress | None = None,
    run: EmulationRun | None = None,
    buffers: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> EmulationRun:
    """Execute the result of `cute.compile` on CPU tensors.

    The host code runs as compiled and every kernel it launches runs in the emulator, in order;
    results land in the tensors that were passed.

    Args:
        compiled: compiled with `--keep-ptx`, with or without `--enable-tvm-ffi`; or an object
            with that PTX as `__ptx__` and an exported `host_object`.
        args: what a GPU call would take, with torch CPU tensors for device tensors. A plain
            function takes `cute.runtime.from_dlpack(...)` tensors and a stream.
        schedule: when asynchronous work lands: "eager", "lazy" or "random".
        seed: seed of the random schedule.
        hazards: "full" for every check, "basic" for those that cost little: no races. "ordered" is
            "full" for kernels that must give the same bits in every run: also reported is when
            CTAs add floating-point numbers to one address in no fixed order.
        ctas: execute some CTAs only: about so many, spread evenly over each grid, or those whose
            index (x, y, z) the callable takes; whole clusters. What the others write stays as it
            was, and the counters are of what ran.
        progress: called with (CTAs done, CTAs in the launch).
        run: an earlier run to add to.
        buffers: tensors, by name, that kernels reach through raw pointers.
        kwargs: keyword arguments of the compiled function.

    Raises:
        EmulationError: the kernel did something the machine cannot or must not do.
        Exception: whatever the host code itself raises, such as a dtype mismatch.
    """
    program = _program_of(compiled)
    record = EmulationRun() if run is None else run
    memory = GlobalMemory()
    named = {**kwargs, **(buffers or {})}
    for region in memory_regions(list(program.host.signature.parameters), args, named):
        memory.add(region.start, region.nbytes, region.name)
    policy = _Policy(schedule, seed, hazards, ctas, progress)

    def on_launch(captured: KernelLaunch) -> None:
        _execute(program.module.kernels[captured.kernel_name], captured, memory, policy, record)

    # The matrix products are small: with several BLAS threads on a busy machine they run 7 times
    # slower, waiting for one another.
    with threadpool_limits(limits=1, user_api="blas"):
        program.host.run(args, kwargs, on_launch, record.host_calls)
    return record


class _Policy(NamedTuple):
    schedule: str
    seed: int
    hazards: str
    ctas: Selection
    progress: Progress | None


def _execute(
    kernel: Kernel,
    captured: KernelLaunch,
    memory: GlobalMemory,
    policy: _Policy,
    record: EmulationRun,
) -> None:
    """Runs one kernel; a launch that fails is recorded too, up to where it came."""
    counters = Counters()
    request = Launch(
        kernel=kernel,
        grid=captured.grid,
        block=captured.block,
        cluster=captured.cluster,
        shared_bytes=captured.shared_bytes,
        params=list(captured.parameters),
        ctas=policy.ctas,
        previous=record.previous,
    )
    record.previous.start(captured.programmatic)
    try:
        with kernel.lock:
            run_kernel(
                request,
                memory,
                schedule=policy.schedule,
                seed=policy.seed,
                counters=counters,
                hazards=record.hazards,
                checks=policy.hazards,
                progress=policy.progress,
            )
    finally:
        record.previous.end(memory.loaded, memory.stored)
        info = LaunchInfo(
            kernel_name=captured.kernel_name,
            grid=captured.grid,
            block=captured.block,
            cluster=captured.cluster,
            shared_bytes=captured.shared_bytes + _static_shared_bytes(kernel),
            registers_set=tuple(counters.registers_set),
            ctas_run=counters.ctas,
        )
        record.add(info, counters.as_dict())
        record.printed += "".join(counters.printed)


class _Program(NamedTuple):
    host: HostProgram
    module: Module


def _program_of(compiled: Any) -> _Program:
    """The parsed kernels and host program of a compiled function; made once and kept on it."""
    cached: _Program | None = getattr(compiled, _CACHE, None)
    if cached is not None:
        return cached
    ptx = getattr(compiled, "__ptx__", None)
    if not ptx:
        raise EmulationError(
            "the compiled function carries no PTX: compile it with options='--keep-ptx'"
        )
    module = _module_of(ptx)
    kernels = {
        name: KernelSignature(
            tuple(param.size for param in kernel.params),
            _static_shared_bytes(kernel),
            kernel.reqntid,
        )
        for name, kernel in module.kernels.items()
    }
    device, exported = DeviceFacts.of_target(module.target), getattr(compiled, "host_object", None)
    host: HostProgram = (
        CompiledHost(compiled, kernels, device)
        if exported is None
        else LinkedHost(exported, kernels, device)
    )
    program = _Program(host, module)
    setattr(compiled, _CACHE, program)
    return program


@lru_cache(maxsize=128)
def _stateless_module(ptx: str) -> Module | None:
    """One decoded program for all functions with this text; None where it has variables."""
    module = parse_module(ptx)
    return None if any(kernel.arrays for kernel in module.kernels.values()) else module


def _module_of(ptx: str) -> Module:
    """The parsed module; variables in memory belong to one compiled function each."""
    return _stateless_module(ptx) or parse_module(ptx)


def _static_shared_bytes(kernel: Kernel) -> int:
    return sum(v.size for v in kernel.variables.values() if v.space == "shared")
