"""What only a GPU shows of a call: streams, graphs, devices, and that nothing waits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

import hopperflash

pytestmark = pytest.mark.gpu

# A quarter of a second or more: longer than the calls behind it take to launch.
SLEEP_CYCLES = 500_000_000


class Dense:
    """Forward and backward of dense tensors, whose values can be replaced."""

    def __init__(self, device: str = "cuda", seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.values = [
            torch.randn(*self.rows, heads, 128, generator=generator).bfloat16().to(device)
            for heads in (4, 2, 2, 4)
        ]

    rows = (2, 333)

    def step(self) -> tuple[Tensor, ...]:
        """(out, dq, dk, dv)."""
        *operands, dout = self.values
        leaves = [x.detach().requires_grad_() for x in operands]
        out = self.forward(*leaves)
        return (out.detach(), *torch.autograd.grad(out, leaves, dout))

    def forward(self, *qkv: Tensor) -> Tensor:
        out = hopperflash.flash_attn_func(*qkv, causal=True)
        assert isinstance(out, Tensor)
        return out


class Packed(Dense):
    """The same of packed sequences, whose lengths and their bound stay on the GPU."""

    rows = (666,)

    def __init__(self, device: str = "cuda", seed: int = 0) -> None:
        super().__init__(device, seed)
        self.offsets = torch.tensor([0, 130, 130, 600], dtype=torch.int32, device=device)
        self.longest = self.offsets.diff().max()

    def forward(self, *qkv: Tensor) -> Tensor:
        lengths = (self.offsets, self.offsets, self.longest, self.longest)
        out = hopperflash.flash_attn_varlen_func(*qkv, *lengths, causal=True)
        assert isinstance(out, Tensor)
        return out


LAYOUTS = pytest.mark.parametrize("layout", [Dense, Packed])


@contextmanager
def nothing_waits() -> Iterator[None]:
    """Inside it, torch raises where it would synchronise."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def assert_equal(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    """Bit for bit but for dq, which is added up in any order."""
    for index, (one, other) in enumerate(zip(found, wanted, strict=True)):
        if index == 1:
            torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)
        else:
            assert torch.equal(one, other), index


@LAYOUTS
def test_a_warm_call_neither_waits_nor_takes_memory_from_the_driver(layout):
    problem = layout()
    problem.step()
    problem.step()
    before = torch.cuda.memory_stats()["num_device_alloc"]
    with nothing_waits():
        for _ in range(10):
            problem.step()
    assert torch.cuda.memory_stats()["num_device_alloc"] == before


@LAYOUTS
def test_the_current_stream_is_used(layout):
    problem = layout()
    want = problem.step()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), nothing_waits():
        torch.cuda._sleep(SLEEP_CYCLES)
        got = problem.step()
        still_sleeping = not stream.query()
    assert still_sleeping
    stream.synchronize()
    assert_equal(got, want)


@LAYOUTS
def test_two_streams_do_not_disturb_each_other(layout):
    """Their calls overlap, and neither's scratch memory is the other's."""
    problems = [layout(seed=seed) for seed in (1, 2)]
    wanted = [problem.step() for problem in problems]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    results: list[list[tuple[Tensor, ...]]] = [[], []]
    for stream in streams:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(SLEEP_CYCLES)
    for _ in range(5):
        for stream, problem, found in zip(streams, problems, results, strict=True):
            with torch.cuda.stream(stream):
                found.append(problem.step())
    assert not any(stream.query() for stream in streams)
    torch.cuda.synchronize()
    for want, found in zip(wanted, results, strict=True):
        for got in found:
            assert_equal(got, want)


@LAYOUTS
def test_a_warm_call_is_captured_and_replayed_with_other_values(layout):
    problem, other = layout(seed=1), layout(seed=2)
    want = other.step()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # autograd is warm where it is captured: not on stream 0
        problem.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = problem.step()
    for value, replacement in zip(problem.values, other.values, strict=True):
        value.copy_(replacement)
    for result in got:
        result.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    assert_equal(got, want)


@LAYOUTS
def test_the_tensors_device_is_used_whichever_is_current(layout):
    if torch.cuda.device_count() < 2:
        pytest.skip("torch sees one CUDA device")
    first, second = (layout(f"cuda:{index}") for index in range(2))
    want, _ = first.step(), second.step()
    side = torch.cuda.Stream(device=1)
    side.wait_stream(torch.cuda.current_stream(1))
    with torch.cuda.stream(side):
        torch.cuda._sleep(SLEEP_CYCLES)
        with torch.cuda.device(0), nothing_waits():
            got = second.step()
            assert torch.cuda.current_device() == 0
        assert not side.query(), "the calls did not go to the second device's current stream"
    side.synchronize()
    assert {x.device for x in got} == {torch.device("cuda", 1)}
    if torch.cuda.get_device_capability(0) == torch.cuda.get_device_capability(1):
        assert_equal(tuple(x.to("cuda:0") for x in got), want)
