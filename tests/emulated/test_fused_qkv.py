"""The kernels read q, k and v where they lie between one another."""

from __future__ import annotations

import pytest
import torch

import hopperflash
from tests.support.fused import FUSED, assert_equals_plain

pytestmark = [pytest.mark.emulated, pytest.mark.xdist_group("fp16-64")]


@pytest.mark.parametrize("name", ["qkv", "varlen kv"])
def test_equals_the_plain_function(name: str) -> None:
    with hopperflash.emulate("sm_90a") as run:
        assert_equals_plain(name)
    assert run.hazards == []


@pytest.mark.parametrize("name", FUSED)
def test_nothing_is_copied(name: str) -> None:
    """No operand is: the plan of views of one tensor lists no copies."""
    *first, fused = (torch.randn(shape, device="meta").half() for shape in FUSED[name].shapes)
    q, k, v = (*first, *fused.unbind(-3))
    lengths = {}
    if fused.dim() == 4:
        offsets = torch.zeros(4, dtype=torch.int32, device="meta")
        lengths = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
    plan = hopperflash.make_plan(q, k, v, causal=True, arch="sm_90a", **lengths)
    assert plan.copies == ()
