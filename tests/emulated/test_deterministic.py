"""`deterministic=True`: dQ is added up in one order, whatever the schedule."""

from __future__ import annotations

from dataclasses import replace
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
from tests.support.packed_cases import PackedCase, Side, check_packed, compute

pytestmark = pytest.mark.emulated

SEEDS, FEW_SEEDS = 20, 2


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
SIDES = Side((40, 130), before=3), Side((300, 150))
PACKED = PackedCase(
    "packed",
    seqlen_q=SIDES[0].total,
    seqlen_k=SIDES[1].total,
    causal=True,
    dlse=True,
    deterministic=True,
    side_q=SIDES[0],
    side_k=SIDES[1],
)
WINDOWED = case(64, 129, 400, window=(250, 20), heads_q=2)
GROUPED = case(64, 65, 400, causal=True, heads_q=4, heads_k=2)
WIDE = case(256, 65, 200, causal=True)


def gradients(case: BackwardCase, schedule: str, seed: int, arch: str) -> dict[str, Tensor]:
    """dq, dk and dv, and the fp32 "dq_acc" before rounding hides most differences."""
    accumulators: list[Tensor] = []
    launch = EmulationSession.launch

    def keep_accumulator(self: EmulationSession, kernel: Any, operands: Any) -> None:
        launch(self, kernel, operands)
        if "bwd_postprocess" in self.run.launches[-1].kernel_name:
            accumulators.append(operands[0].clone())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EmulationSession, "launch", keep_accumulator)
        with hopperflash.emulate(arch, schedule=schedule, seed=seed) as run:
            found = _results(case)
    assert run.hazards == []
    (accumulator,) = accumulators
    return {**found, "dq_acc": accumulator}


def _results(case: BackwardCase) -> dict[str, Tensor]:
    """dq, dk and dv, once they have been compared with fp64."""
    if isinstance(case, PackedCase):
        packed = compute(case)
        check_packed(case, packed)
        return {name: getattr(packed, name) for name in GRADIENTS}
    inputs, cotangents = make_inputs(case), make_cotangents(case)
    found = gradients_of(case, hopperflash.flash_attn_func, inputs, cotangents)._asdict()
    check_gradients(case, found, inputs, cotangents)
    return found


def _params() -> list[Any]:
    """Every case with its arch and the number of random schedules: many of the first by default."""
    many = [("sm_90a", case, SEEDS) for case in CASES]
    given = (
        *many,
        *(("sm_90a", case, FEW_SEEDS) for case in (*CASES[1:], WINDOWED, PACKED)),
        *(("sm_80", case, FEW_SEEDS) for case in (GROUPED, WIDE)),
    )
    slow = [*many[1:], ("sm_80", WIDE, FEW_SEEDS)]
    return [
        pytest.param(
            *fields,
            id=f"{arch}-{case}-{seeds}",
            marks=[
                pytest.mark.xdist_group(f"{case.dtype}-{padded_head_dim(case.head_dim)}"),
                *([pytest.mark.slow] if fields in slow else []),
            ],
        )
        for fields in given
        for arch, case, seeds in [fields]
    ]


@pytest.mark.parametrize(("arch", "case", "seeds"), _params())
def test_gradients_are_equal_bit_for_bit_in_every_schedule(
    arch: str, case: BackwardCase, seeds: int
) -> None:
    first = gradients(case, "eager", 0, arch)
    for schedule, seed in (("lazy", 0), *(("random", seed) for seed in range(seeds))):
        again = gradients(case, schedule, seed, arch)
        for name, tensor in first.items():
            assert torch.equal(tensor, again[name]), (
                f"{name} differs from eager's in {schedule}, seed {seed}"
            )


@pytest.mark.xdist_group("bf16-128")
@pytest.mark.parametrize(("arch", "head_dim"), [("sm_90a", 128), ("sm_80", 64)])
def test_gradients_differ_between_schedules_without_it(arch: str, head_dim: int) -> None:
    """So that the test above can fail: dQ is the one that depends on the order."""
    free = replace(case(head_dim, 65, 400, heads_q=2), deterministic=False)
    found = [gradients(free, "random", seed, arch) for seed in range(4)]
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
