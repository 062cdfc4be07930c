"""The bytes of the model are the bytes that the emulator counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hopperflash
from hopperflash.analysis.tiled_traffic import tiled_traffic
from hopperflash.analysis.traffic import Traffic
from hopperflash.emulator import EmulationRun

pytestmark = [pytest.mark.emulated, pytest.mark.xdist_group("bf16-64")]

CASES = {
    "whole tiles": ((1, 384, 384, 2, 2, 64), {}),
    "causal, partial tiles": ((1, 300, 300, 2, 2, 64), {"causal": True}),
    "more keys, shared": ((2, 130, 300, 4, 2, 64), {"causal": True}),
    "pairs of CTAs": ((1, 500, 300, 2, 2, 128), {}),
    "window": ((1, 500, 500, 1, 1, 64), {"window_size": (100, 20)}),
    "rows without keys": ((1, 300, 100, 1, 1, 40), {"causal": True}),
}
ONLY_HOPPER = ("pairs of CTAs",)


def moved(run: EmulationRun) -> Traffic:
    c = run.counters
    return Traffic(
        c["tma_load_bytes"] + c["global_load_bytes"],
        c["tma_store_bytes"] + c["global_store_bytes"] + c["global_atomic_bytes"],
    )


@pytest.mark.parametrize(
    ("sizes", "options", "arch"),
    [
        pytest.param(*case, arch, id=f"{name}-{arch}")
        for name, case in CASES.items()
        for arch in (("sm_90a",) if name in ONLY_HOPPER else ("sm_90a", "sm_80"))
    ],
)
def test_model_equals_what_is_counted(
    sizes: tuple[int, ...], options: dict[str, Any], arch: str
) -> None:
    batch, seqlen_q, seqlen_k, heads_q, heads_k, head_dim = sizes
    q, k, v = (
        torch.randn(batch, seqlen, heads, head_dim).bfloat16()
        for seqlen, heads in ((seqlen_q, heads_q), (seqlen_k, heads_k), (seqlen_k, heads_k))
    )
    with hopperflash.emulate(arch, schedule="eager", hazards="basic") as forward:
        out, lse = hopperflash.flash_attn_func(q, k, v, return_lse=True, **options)
    with hopperflash.emulate(arch, schedule="eager", hazards="basic") as backward:
        hopperflash.flash_attn_backward(out, q, k, v, out, lse, **options)
    for direction, run in (("forward", forward), ("backward", backward)):
        plan = hopperflash.make_plan(q, k, v, arch=arch, direction=direction, **options)
        model = tiled_traffic(plan)
        assert moved(run) == model.asked
        if direction == "forward":
            c = run.counters
            unique = Traffic(c["unique_global_load_bytes"], c["unique_global_store_bytes"])
            assert unique == model.once
