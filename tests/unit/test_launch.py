"""How a plan is launched: under which device, and in which order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import hopperflash
from hopperflash.problem import GRADIENTS
from hopperflash.runtime import launch


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a launch without a GPU does, in order: its device, and its kernels."""
    found: list[str] = []

    @contextmanager
    def guard(device: torch.device) -> Iterator[None]:
        found.append(f"enter {device}")
        try:
            yield
        finally:
            found.append(f"leave {device}")

    monkeypatch.setattr(torch.cuda, "device", guard)
    monkeypatch.setattr(
        launch, "compile_kernel", lambda spec: lambda *_: found.append(spec.ref.name)
    )
    return found


def backward() -> tuple[hopperflash.LaunchPlan, dict[str, torch.Tensor]]:
    q = torch.randn(1, 16, 1, 64).half()
    lse = torch.zeros(1, 1, 16)
    plan = hopperflash.make_plan(q, q, q, arch="sm_90a", direction="backward")
    named = dict.fromkeys(("q", "k", "v", "out", "dout"), q)
    return plan, {**named, "lse": lse, "dlse": lse}


def test_the_device_is_made_current_once_for_all_kernels(events):
    plan, operands = backward()
    assert set(launch.execute(plan, operands, None)) == {*GRADIENTS}
    kernels = [call.spec.ref.name for call in plan.calls]
    assert len(kernels) == 3
    assert events == ["enter cpu", *kernels, "leave cpu"]


def test_the_device_is_given_back_when_a_kernel_fails(events, monkeypatch):
    def failing(spec):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(launch, "compile_kernel", failing)
    with pytest.raises(RuntimeError, match="no such kernel"):
        launch.execute(*backward(), None)
    assert events == ["enter cpu", "leave cpu"]
