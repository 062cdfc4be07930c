"""What a warm call asks of the machine: memory of torch, and one launch for each kernel."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import hopperflash
from hopperflash.emulator import EmulationRun
from hopperflash.runtime import cache, launch
from hopperflash.runtime import compile as compile_module

pytestmark = [pytest.mark.emulated, pytest.mark.xdist_group("fp16-64")]

# For each kernel: a test of a flag, a look at the thread's current device, the launch.
PER_KERNEL = ("cuda_dialect_init_library_once", "cudaGetDevice", "cudaLaunchKernelEx")
COPIES = ("_to_copy", "copy_", "clone")
ON_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
WAITING = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class Recorder(TorchDispatchMode):
    """Names of the torch operators that run inside; `waits` are those that need values on the host,
    or copy."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self.devices: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "hopperflash":
            with self:  # what it consists of is seen too
                return func.redispatch(ON_CPU, *args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if name in COPIES or any(tag in func.tags for tag in WAITING):
            self.waits.append(name)
        result = func(*args, **(kwargs or {}))
        results = result if isinstance(result, (tuple, list)) else (result,)
        self.devices |= {str(x.device) for x in results if isinstance(x, Tensor)}
        return result


def leaves(*lead: int) -> tuple[Tensor, ...]:
    """q, k, v with gradients."""
    return tuple(torch.randn(*lead, heads, 64).half().requires_grad_() for heads in (2, 1, 1))


def dense() -> Callable[[], None]:
    q, k, v = leaves(1, 40)
    dout = torch.randn(1, 40, 2, 64).half()

    def step() -> None:
        out = hopperflash.flash_attn_func(q, k, v, causal=True)
        torch.autograd.grad(out, (q, k, v), dout)

    return step


def packed() -> Callable[[], None]:
    q, k, v = leaves(40)
    dout = torch.randn(40, 2, 64).half()
    offsets = torch.tensor([0, 10, 10, 40], dtype=torch.int32)

    def step() -> None:
        out = hopperflash.flash_attn_varlen_func(q, k, v, offsets, offsets, 30, 30, causal=True)
        torch.autograd.grad(out, (q, k, v), dout)

    return step


def observed(step: Callable[[], None]) -> tuple[EmulationRun, Recorder]:
    with hopperflash.emulate("sm_90a", hazards="basic") as run, Recorder() as torch_operators:
        step()
    return run, torch_operators


@pytest.fixture(params=[dense, packed])
def step(request, monkeypatch) -> Callable[[], None]:
    """Forward and backward, whose kernels this process has not loaded yet."""
    monkeypatch.setattr(compile_module, "_kernels", {})
    return request.param()


def test_a_warm_call_only_launches(step, monkeypatch):
    cold, _ = observed(step)
    kernels = len(cold.launches)
    assert cold.host_calls["cudaLibraryLoadData"] == len(compile_module._kernels) > 2

    def untouched(*_: Any) -> Any:
        raise AssertionError("a warm call asks the cache")

    monkeypatch.setattr(cache, "obtain", untouched)
    warm, torch_operators = observed(step)
    assert len(warm.launches) == kernels
    assert warm.host_calls == Counter(dict.fromkeys(PER_KERNEL, kernels))
    assert torch_operators.waits == []
    assert torch_operators.devices == {"cpu"}


@pytest.mark.parametrize("wait", [Tensor.item, lambda x: x.nonzero(), Tensor.clone])
def test_a_call_that_waits_or_copies_would_be_seen(monkeypatch, wait):
    step, prepare = dense(), launch.prepare_operands

    def waiting(plan: Any, operands: Any) -> dict[str, Tensor]:
        wait(operands["q"][0, 0, 0, 0])
        prepared: dict[str, Tensor] = prepare(plan, operands)
        return prepared

    observed(step)
    monkeypatch.setattr(launch, "prepare_operands", waiting)
    _, torch_operators = observed(step)
    assert len(torch_operators.waits) == 2
