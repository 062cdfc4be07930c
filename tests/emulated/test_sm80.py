"""The Ampere kernels, executed through their real host code, on the cases of the Hopper ones."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import pytest
import torch

import hopperflash
from hopperflash.plan.tiles import padded_head_dim
from hopperflash.runtime.emulation import SCHEDULES
from tests.support.band_cases import BAND_CASES
from tests.support.cases import FORWARD_CASES, Case, check_forward
from tests.support.gradient_cases import BACKWARD_CASES, BackwardCase, check_backward
from tests.support.packed_cases import PACKED_CASES, PackedCase, check_packed, compute

pytestmark = pytest.mark.emulated

# Each dtype on the parts of one tile table.
ARCH_OF = {"bf16": "sm_80", "fp16": "sm_86"}


def _params(cases: Sequence[Case]) -> list[Any]:
    """Every case in one schedule; compiling costs most, so half of the kernels are slow tests."""
    return [
        pytest.param(
            case,
            SCHEDULES[index % 3],
            id=f"{case}-{SCHEDULES[index % 3]}",
            marks=[
                pytest.mark.xdist_group(f"sm80-{case.dtype}-{padded_head_dim(case.head_dim)}"),
                *([] if _is_sampled(case) else [pytest.mark.slow]),
            ],
        )
        for index, case in enumerate(cases)
    ]


def _is_sampled(case: Case) -> bool:
    if max(case.head_dim, case.head_dim_v) <= 64:
        return True
    return case.causal == (case.dtype == "bf16")


@pytest.mark.parametrize(("case", "schedule"), _params(FORWARD_CASES))
def test_forward_matches_fp64(case: Case, schedule: str) -> None:
    with hopperflash.emulate(ARCH_OF[case.dtype], schedule=schedule, seed=1) as run:
        check_forward(case, hopperflash.flash_attn_func)
    assert run.hazards == []
    assert run.counters["shared_bank_conflicts"] == 0
    (launch,) = run.launches
    assert launch.kernel_name.startswith("hopperflash_fwd_sm80_")


@pytest.mark.parametrize(("case", "schedule"), _params(BACKWARD_CASES))
def test_backward_matches_fp64(case: BackwardCase, schedule: str) -> None:
    with hopperflash.emulate(ARCH_OF[case.dtype], schedule=schedule, seed=1) as run:
        check_backward(case, hopperflash.flash_attn_func)
    assert run.hazards == []
    assert run.counters["shared_bank_conflicts"] == 0
    names = [launch.kernel_name for launch in run.launches]
    for name, kernel in zip(
        names, ("fwd_sm80", "bwd_preprocess", "bwd_sm80", "bwd_postprocess"), strict=True
    ):
        assert name.startswith(f"hopperflash_{kernel}_")


def _variant_params(cases: Sequence[BackwardCase], layout: str) -> list[Any]:
    """Every case in one schedule; of the head dims one that keeps P in registers and one that does
    not, the others are slow tests."""
    return [
        pytest.param(
            case,
            SCHEDULES[1 + index % 2],
            id=f"{case}-{SCHEDULES[1 + index % 2]}",
            marks=[
                pytest.mark.xdist_group(f"sm80-{layout}-{case.mask.kind.value}-{case.head_dim}"),
                *([] if case.head_dim == case.head_dim_v in (64, 192) else [pytest.mark.slow]),
            ],
        )
        for index, case in enumerate(cases)
    ]


@pytest.mark.parametrize(("case", "schedule"), _variant_params(BAND_CASES, "dense"))
def test_windows_and_caps_match_fp64(case: BackwardCase, schedule: str) -> None:
    with hopperflash.emulate(ARCH_OF[case.dtype], schedule=schedule, seed=1) as run:
        check_forward(case, hopperflash.flash_attn_func)
        check_backward(case, hopperflash.flash_attn_func)
    assert run.hazards == []


@pytest.mark.parametrize(("case", "schedule"), _variant_params(PACKED_CASES, "packed"))
def test_packed_sequences_match_fp64(case: PackedCase, schedule: str) -> None:
    with hopperflash.emulate(ARCH_OF[case.dtype], schedule=schedule, seed=1) as run:
        found = compute(case)
    check_packed(case, found)
    assert run.hazards == []


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            id=str(case),
            marks=pytest.mark.xdist_group(f"sm80-packed-{case.mask.kind.value}-{case.head_dim}"),
        )
        for case in PACKED_CASES
        if case.deterministic and case.head_dim == 64
    ],
)
def test_packed_gradients_repeat_bit_for_bit(case: PackedCase) -> None:
    runs = []
    for seed in (1, 2):
        with hopperflash.emulate("sm_80", schedule="random", seed=seed, hazards="basic"):
            runs.append(compute(case))
    for name, first, second in zip(runs[0]._fields, *runs, strict=True):
        assert torch.equal(first, second), name


# Query heads a key head, options, and lengths of packed sequences: each ratio leaves rows idle.
FOLDED: tuple[tuple[int, dict[str, Any], tuple[tuple[int, ...], tuple[int, ...]] | None], ...] = (
    (3, {"causal": True}, None),
    (5, {"window_size": (-1, 20), "softcap": 2.0}, ((5, 70, 0, 26), (60, 90, 10, 0))),
    (9, {}, None),
    (6, {"causal": True}, ((50, 0, 43), (7, 60, 80))),
    (7, {"window_size": (-1, 5)}, None),
)


@pytest.mark.parametrize(
    ("ratio", "options", "lengths"),
    [
        pytest.param(
            *fields,
            id=f"{fields[0]}-{'packed' if fields[2] else 'dense'}",
            marks=[pytest.mark.xdist_group("sm80-bf16-64"), *([pytest.mark.slow] * (index > 2))],
        )
        for index, fields in enumerate(FOLDED)
    ],
)
def test_folded_heads_equal_those_with_keys_of_their_own(
    ratio: int, options: dict[str, Any], lengths: tuple[tuple[int, ...], tuple[int, ...]] | None
) -> None:
    """Bit for bit: the blocks of a row's keys are the same, whatever shares its tile, up to those
    at a window's far edge, where a row may be rescaled once more."""
    # Of 3 heads, the query behind the first tile's sees the first key of another block.
    sides = lengths or ((93,), (115,))
    (total_q, total_k), heads_k = (sum(side) for side in sides), 2
    torch.manual_seed(0)
    # Small integers, of which the emulator's fp32 products are exact in any order.
    q, k, v = (
        torch.randint(-limit, limit + 1, (total, heads, 64)).bfloat16()
        for limit, total, heads in (
            (1, total_q, heads_k * ratio),
            (1, total_k, heads_k),
            (3, total_k, heads_k),
        )
    )
    offsets = [torch.tensor([0, *accumulate(side)], dtype=torch.int32) for side in sides]
    results = []
    for keys_and_values in ((k, v), [x.repeat_interleave(ratio, dim=1) for x in (k, v)]):
        with hopperflash.emulate("sm_80", schedule="lazy") as run:
            if lengths is None:
                tensors = [x[None] for x in (q, *keys_and_values)]
                found = hopperflash.flash_attn_func(*tensors, return_lse=True, **options)
            else:
                bounds = (max(side) for side in sides)
                found = hopperflash.flash_attn_varlen_func(
                    q, *keys_and_values, *offsets, *bounds, return_lse=True, **options
                )
        assert run.hazards == []
        results.append((run.launches[-1], found))
    (folded, ours), (plain, theirs) = results
    assert f"group{ratio}" in folded.kernel_name
    assert "group" not in plain.kernel_name
    for name, one, other in zip(("out", "lse"), ours, theirs, strict=True):
        assert torch.equal(one, other), name
