"""`deterministic=True`: dQ is added up in one order, whatever the schedule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import hopperflash
from hopperflash.plan.tiles import padded_head_dim
from hopperflash.problem import GRADIENTS
from hopperflash.runtime.emulation import EmulationSession
from tests.support.cases import make_inputs
from tests.support.gradient_cases import (
    BackwardCase,
    check_gradients,
    gradients_of,
    make_cotangents,
)

pytestmark = pytest.mark.emulated

SEEDS = 20


def case(head_dim: int, seqlen_q: int, seqlen_k: int, **fields: object) -> BackwardCase:
    """Several key tiles for a query tile, whose order of additions is then free."""
    return BackwardCase(
        "deterministic",
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        head_dim=head_dim,
        head_dim_v=head_dim,
        deterministic=True,
        **fields,
    )


CASES = (
    case(128, 129, 300, causal=True, heads_q=2, dlse=True),
    case(128, 65, 400, heads_q=2),
    case(256, 65, 200, causal=True, heads_q=3),
    case(256, 64, 200, dtype="fp16", batch=2),
    case(64, 200, 300, causal=True, heads_q=4, heads_k=2),
)


def gradients(case: BackwardCase, schedule: str, seed: int) -> dict[str, Tensor]:
    """dq, dk and dv, and the fp32 "dq_acc" before rounding hides most differences."""
    accumulators: list[Tensor] = []
    launch = EmulationSession.launch

    def keep_accumulator(self: EmulationSession, kernel: Any, operands: Any) -> None:
        launch(self, kernel, operands)
        if "bwd_postprocess" in self.run.launches[-1].kernel_name:
            accumulators.append(operands[0].clone())

    inputs, cotangents = make_inputs(case), make_cotangents(case)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EmulationSession, "launch", keep_accumulator)
        with hopperflash.emulate("sm_90a", schedule=schedule, seed=seed) as run:
            found = gradients_of(case, hopperflash.flash_attn_func, inputs, cotangents)
    assert run.hazards == []
    (accumulator,) = accumulators
    return {**found._asdict(), "dq_acc": accumulator}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            id=str(case),
            marks=pytest.mark.xdist_group(f"{case.dtype}-{padded_head_dim(case.head_dim)}"),
        )
        for case in CASES
    ],
)
def test_gradients_are_equal_bit_for_bit_in_every_schedule(case: BackwardCase) -> None:
    first = gradients(case, "eager", 0)
    named = {name: first[name] for name in GRADIENTS}
    check_gradients(case, named, make_inputs(case), make_cotangents(case))
    for schedule, seed in (("lazy", 0), *(("random", seed) for seed in range(SEEDS))):
        again = gradients(case, schedule, seed)
        for name, tensor in first.items():
            assert torch.equal(tensor, again[name]), (
                f"{name} differs from eager's in {schedule}, seed {seed}"
            )


@pytest.mark.xdist_group("bf16-128")
def test_gradients_differ_between_schedules_without_it() -> None:
    """So that the test above can fail: dQ is the one that depends on the order."""
    free = BackwardCase("free", seqlen_q=65, seqlen_k=400, heads_q=2, head_dim=128, head_dim_v=128)
    found = [gradients(free, "random", seed) for seed in range(4)]
    for name in ("dk", "dv"):
        assert all(torch.equal(found[0][name], other[name]) for other in found)
    assert not all(torch.equal(found[0]["dq_acc"], other["dq_acc"]) for other in found)


def test_it_takes_one_counter_per_query_tile_beyond_the_accumulator() -> None:
    q = torch.empty(1, 4096, 8, 128, dtype=torch.bfloat16)
    free, ordered = (
        hopperflash.make_plan(
            q, q, q, deterministic=deterministic, arch="sm_90a", direction="backward"
        )
        for deterministic in (False, True)
    )
    extra = sum(b.nbytes for b in ordered.workspaces) - sum(b.nbytes for b in free.workspaces)
    assert 0 < extra <= 8 * 4096 // 64 * 4
