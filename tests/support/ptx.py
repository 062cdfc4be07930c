"""Small hand-written PTX kernels for emulator tests."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hopperflash.emulator.counters import Counters
from hopperflash.emulator.machine import Launch, run_kernel
from hopperflash.emulator.memory import GlobalMemory
from hopperflash.emulator.previous_grids import PreviousGrids
from hopperflash.emulator.ptx_ir import Kernel
from hopperflash.emulator.ptx_parser import parse_module

_TEMPLATE = """
.version 8.8
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 smem[];
.visible .entry kernel({params})
{{
    .reg .pred %p<32>;
    .reg .b16 %h<32>;
    .reg .b32 %r<256>;
    .reg .b64 %d<32>;
    {body}
    ret;
}}
"""

# %d0, %d1, ... hold the parameters; %r0 the thread; %d30 four times, %d31 eight times the thread.
_PROLOGUE = """
    mov.u32 %r0, %tid.x;
    mul.wide.u32 %d30, %r0, 4;
    mul.wide.u32 %d31, %r0, 8;
"""


def kernel_of(body: str, pointers: int = 1) -> Kernel:
    params = ", ".join(f".param .u64 p{i}" for i in range(pointers))
    loads = "\n".join(f"    ld.param.b64 %d{i}, [p{i}];" for i in range(pointers))
    text = _TEMPLATE.format(params=params, body=loads + _PROLOGUE + body)
    return parse_module(text).kernels["kernel"]


class Outcome:
    """Counters and hazards of a run."""

    def __init__(self) -> None:
        self.counters = Counters()
        self.hazards: list[str] = []


def execute(  # noqa: PLR0913 - what a launch takes
    kernel: Kernel | str,
    *arrays: NDArray[Any],
    threads: int = 32,
    grid: int = 1,
    cluster: int = 1,
    schedule: str = "eager",
    seed: int = 0,
    shared_bytes: int = 32768,
    checks: str = "full",
    previous: PreviousGrids | None = None,
) -> Outcome:
    """Run a kernel whose parameters are pointers to these arrays."""
    if isinstance(kernel, str):
        kernel = kernel_of(kernel, len(arrays))
    memory = GlobalMemory()
    for i, array in enumerate(arrays):
        memory.add(array.ctypes.data, array.nbytes, f"array {i}")
    params = [int(a.ctypes.data).to_bytes(8, "little") for a in arrays]
    outcome = Outcome()
    launch = Launch(kernel, (grid, 1, 1), (threads, 1, 1), (cluster, 1, 1), shared_bytes, params)
    launch.previous = previous
    run_kernel(
        launch, memory, schedule=schedule, seed=seed, counters=outcome.counters,
        hazards=outcome.hazards, checks=checks,
    )  # fmt: skip
    if previous is not None:
        previous.end(memory.loaded, memory.stored)
    return outcome


def apply(opcode: str, *sources: NDArray[Any], dtype: Any) -> NDArray[Any]:
    """One instruction on 32 lanes of source arrays; registers follow the arrays' widths."""
    lanes = len(sources[0])
    out = np.zeros(lanes, dtype)
    body, names = [], []
    for i, source in enumerate(sources):
        name = f"%{_bank(source.dtype)}{i + 1}"
        body.append(_load(name, source.dtype, i + 1))
        names.append(name)
    dst = f"%{_bank(out.dtype)}{20}"
    body.append(f"    {opcode} {dst}, {', '.join(names)};")
    body.append(_store(dst, out.dtype))
    execute("\n".join(body), out, *sources, threads=lanes)
    return out


def _bank(dtype: np.dtype[Any]) -> str:
    return {1: "p", 2: "h", 4: "r", 8: "d"}[dtype.itemsize]


def _load(name: str, dtype: np.dtype[Any], pointer: int) -> str:
    size = dtype.itemsize
    address = f"mul.wide.u32 %d29, %r0, {size}; add.s64 %d28, %d{pointer}, %d29;"
    if size == 1:
        return f"{address} ld.global.u8 %h30, [%d28]; setp.ne.u16 {name}, %h30, 0;"
    return f"{address} ld.global.b{8 * size} {name}, [%d28];"


def _store(name: str, dtype: np.dtype[Any]) -> str:
    size = dtype.itemsize
    address = f"mul.wide.u32 %d29, %r0, {size}; add.s64 %d28, %d0, %d29;"
    if size == 1:
        return f"{address} selp.b16 %h31, 1, 0, {name}; st.global.b8 [%d28], %h31;"
    return f"{address} st.global.b{8 * size} [%d28], {name};"
