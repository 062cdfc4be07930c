"""The named cases on a GPU, and what only a GPU shows: streams, graphs, repeated runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import hopperflash
from tests.support.cases import FORWARD_CASES, Case, check_forward, make_inputs

pytestmark = pytest.mark.gpu

CASE = Case("gpu", seqlen_q=333, seqlen_k=500, heads_q=4, heads_k=2, head_dim=128, head_dim_v=128)


def on_gpu(q: Tensor, k: Tensor, v: Tensor, /, **options: Any) -> tuple[Tensor, Tensor]:
    """`flash_attn_func` on the GPU, with results brought back."""
    out, lse = hopperflash.flash_attn_func(*(x.cuda() for x in (q, k, v)), **options)
    return out.cpu(), lse.cpu()


@pytest.mark.parametrize("case", FORWARD_CASES, ids=str)
def test_forward_matches_fp64(case: Case) -> None:
    check_forward(case, on_gpu)


def test_repeated_runs_are_equal() -> None:
    q, k, v = (x.cuda() for x in make_inputs(CASE))
    first = hopperflash.flash_attn_func(q, k, v, causal=True)
    for _ in range(100):
        assert torch.equal(first, hopperflash.flash_attn_func(q, k, v, causal=True))


def test_current_stream_is_used() -> None:
    q, k, v = (x.cuda() for x in make_inputs(CASE))
    want = hopperflash.flash_attn_func(q, k, v)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        got = hopperflash.flash_attn_func(q + 0, k + 0, v + 0)
    assert not stream.query()
    stream.synchronize()
    assert torch.equal(got, want)


def test_a_warm_call_can_be_captured() -> None:
    q, k, v = (x.cuda() for x in make_inputs(CASE))
    want = hopperflash.flash_attn_func(q, k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = hopperflash.flash_attn_func(q, k, v)
    got.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(got, want)
