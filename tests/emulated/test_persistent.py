"""Kernels whose CTAs walk over several tiles: bit for bit what a CTA for each tile computes."""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import hopperflash
from hopperflash.plan import arch_of
from hopperflash.runtime.emulation import SCHEDULES

pytestmark = pytest.mark.emulated


class Shared(NamedTuple):
    """A problem of more tiles than CTAs, whose tile is the same whether SMs are left free or not;
    `lengths` of packed (queries, keys)."""

    name: str
    lengths: tuple[tuple[int, ...], tuple[int, ...]]
    heads: tuple[int, int]  # of Q, of K
    options: dict[str, Any]
    head_dim: int = 64
    packed: bool = False


DENSE = (
    # The first query tiles see no key, and leave zeros where Q has come in.
    Shared("causal", ((300,), (200,)), (4, 2), {"causal": True}, head_dim=128),
    # The first key tiles are seen by no query.
    Shared("window", ((200,), (480,)), (2, 2), {"window_size": (100, 10)}, head_dim=128),
    Shared("full", ((150,), (300,)), (2, 1), {}, head_dim=128),
)
PACKED = (
    Shared("packed", ((5, 130, 0, 100), (70, 150, 30, 130)), (2, 1), {"causal": True}, packed=True),
    Shared("packed-window", ((200, 70), (50, 230)), (2, 2), {"window_size": (60, 20)}, packed=True),
)
SMS = {"sm_90a": 2, "sm_80": 1}  # that are left; an SM of sm_80 holds one or two of these CTAs


def _operands(case: Shared) -> tuple[list[Tensor], dict[str, Any]]:
    """q, k, v and the gradient of the output; lengths of packed sequences by name."""
    torch.manual_seed(0)
    (side_q, side_k), (heads_q, heads_k), d = case.lengths, case.heads, case.head_dim
    total_q, total_k = sum(side_q) + 7, sum(side_k) + 66
    shapes = [(total_q, heads_q, d), (total_k, heads_k, d), (total_k, heads_k, d)]
    if not case.packed:
        rows = (*side_q, *side_k, *side_k)
        shapes = [(1, n, *shape[1:]) for n, shape in zip(rows, shapes, strict=True)]
    tensors = [torch.randn(shape).bfloat16() for shape in (*shapes, shapes[0])]
    if not case.packed:
        return tensors, {}
    offsets = [torch.tensor([0, *accumulate(side)], dtype=torch.int32) for side in case.lengths]
    names = ("cu_seqlens_q", "cu_seqlens_k")
    bounds = {"max_seqlen_q": max(side_q), "max_seqlen_k": max(side_k)}
    return tensors, {**dict(zip(names, offsets, strict=True)), **bounds}


def _run(arch: str, case: Shared, schedule: str, sm_margin: int) -> tuple[list[Tensor], list[int]]:
    """(out, lse, dq, dk, dv), and CTAs of the forward and the backward kernel."""
    (q, k, v, dout), lengths = _operands(case)
    operands = [x.requires_grad_() for x in (q, k, v)]
    function: Any = hopperflash.flash_attn_func
    if case.packed:
        function = hopperflash.flash_attn_varlen_func
    options = {**lengths, **case.options, "deterministic": True, "sm_margin": sm_margin}
    with hopperflash.emulate(arch, schedule=schedule) as run:
        out, lse = function(*operands, **options, return_lse=True)
        gradients = torch.autograd.grad(out, operands, dout)
    assert run.hazards == []
    main = [x for x in run.launches if "_sm90_" in x.kernel_name or "_sm80_" in x.kernel_name]
    names = ["single-tile", "single-tile"]
    if sm_margin:
        takes = arch == "sm_90a" and case.name != "full"
        names = ["dynamic" if takes else "persistent", "persistent"]
    assert [_scheduler(launch.kernel_name) for launch in main] == names
    return [out.detach(), lse, *gradients], [torch.tensor(x.grid).prod().item() for x in main]


def _scheduler(kernel_name: str) -> str:
    return next((name for name in ("persistent", "dynamic") if name in kernel_name), "single-tile")


def _is_slow(arch: str, case: Shared) -> bool:
    return case.name == "packed-window" or (arch == "sm_80" and case.name in {"window", "full"})


@lru_cache
def _single_tile(arch: str, number: int) -> tuple[list[Tensor], list[int]]:
    return _run(arch, _CASES[number], "lazy", 0)


_CASES = (*DENSE, *PACKED)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("arch", "number"),
    [
        pytest.param(
            arch,
            number,
            id=f"{arch}-{case.name}",
            marks=[
                pytest.mark.xdist_group(f"persistent-{arch}-{case.name}"),
                *([pytest.mark.slow] if _is_slow(arch, case) else []),
            ],
        )
        for arch in SMS
        for number, case in enumerate(_CASES)
    ],
)
def test_tiles_of_one_cta_equal_those_of_several(arch: str, number: int, schedule: str) -> None:
    (alone, ctas), case = _single_tile(arch, number), _CASES[number]
    shared, fewer = _run(arch, case, schedule, arch_of(arch).sms - SMS[arch])
    assert all(few <= 2 and few < many for few, many in zip(fewer, ctas, strict=True))
    for name, one, other in zip(("out", "lse", "dq", "dk", "dv"), alone, shared, strict=True):
        assert torch.equal(one, other), name
