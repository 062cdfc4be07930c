"""What runs under a profiler, where the ranges begin and end, and in which thread."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import pytest
import torch

from hopperflash.profiler import passes
from hopperflash.profiler.passes import Attention, Schedule


class Recorder:
    """Stands for an `Attention` on a GPU, and for CUDA's profiler hooks; notes what is called."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.q = self
        self.is_cuda = True

    def forward(self) -> tuple[str, str]:
        self.events.append("forward")
        return "out", "lse"

    def backward(self, *saved: str) -> None:
        assert saved == ("out", "lse")
        self.events.append("backward")

    @contextmanager
    def between(self, name: str):
        self.events.append(f"<{name}>")
        yield
        self.events.append(f"</{name}>")

    def synchronize(self) -> None:
        self.events.append("synchronize")


@pytest.fixture
def recorder(monkeypatch) -> Recorder:
    found = Recorder()
    monkeypatch.setattr(torch.cuda, "synchronize", found.synchronize)
    monkeypatch.setattr(torch.cuda.profiler, "profile", lambda: found.between("profile"))
    monkeypatch.setattr(torch.cuda.nvtx, "range", found.between)
    return found


def test_warm_passes_are_profiled_each_in_a_range(recorder):
    passes.run(recorder, Schedule(("forward", "backward"), iterations=1, warm_up=1))
    assert recorder.events == [
        "forward", "backward", "synchronize",
        "<profile>",
        "<hopperflash forward>", "forward", "</hopperflash forward>",
        "<hopperflash backward>", "backward", "</hopperflash backward>",
        "synchronize",
        "</profile>",
    ]  # fmt: skip


def test_a_backward_alone_has_its_forward_before_the_profile(recorder):
    passes.run(recorder, Schedule(("backward",), iterations=2, warm_up=0))
    profiled = recorder.events[recorder.events.index("<profile>") :]
    assert recorder.events[:2] == ["forward", "synchronize"]
    assert "forward" not in profiled and profiled.count("backward") == 2


def attention(**options) -> Attention:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 40, 2, 16, generator=generator).bfloat16() for _ in range(3))
    return Attention(q, k, v, {"causal": True, **options})


def test_the_backward_is_autograds_and_stays_in_this_thread(monkeypatch):
    """Autograd launches from threads of its own, where a range of this one is not open."""
    threads = []
    direct = passes.api.flash_attn_backward

    def noted(*arguments, **keywords):
        threads.append(threading.current_thread())
        return direct(*arguments, **keywords)

    monkeypatch.setattr(passes.api, "flash_attn_backward", noted)
    given = attention()
    gradients = given.backward(*given.forward())
    assert threads == [threading.current_thread()]
    operands = [x.clone().requires_grad_() for x in (given.q, given.k, given.v)]
    out, _ = Attention(*operands, given.options).forward()
    torch.testing.assert_close(gradients, torch.autograd.grad(out.sum(), operands))


def test_packed_sequences_run_on_a_cpu():
    given = attention()
    q, k, v = (x[0] for x in (given.q, given.k, given.v))
    offsets = torch.tensor([0, 15, 40], dtype=torch.int32)
    packed = Attention(q, k, v, given.options, offsets, 25).on("cpu", deterministic=True)
    passes.run(packed, Schedule(("forward", "backward"), iterations=1, warm_up=1))
    out, _ = packed.forward()
    assert out.shape == q.shape and out.isfinite().all()
