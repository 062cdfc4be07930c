"""Query heads folded into the rows of a forward tile: results are those of heads by themselves."""

from __future__ import annotations

from itertools import accumulate
from typing import Any, NamedTuple

import pytest
import torch

import hopperflash

pytestmark = pytest.mark.emulated


class Folded(NamedTuple):
    """Query heads a key head, which leave rows idle; lengths of packed (queries, keys)."""

    ratio: int
    options: dict[str, Any]
    lengths: tuple[tuple[int, ...], tuple[int, ...]] | None = None


# Of 3 heads, the query behind the first tile's sees the first key of another block.
KEYS = {"sm_80": 115, "sm_90a": 157}
FOLDED = (
    Folded(3, {"causal": True}),
    Folded(5, {"window_size": (-1, 20), "softcap": 2.0}, ((5, 70, 0, 26), (60, 90, 10, 0))),
    Folded(6, {"causal": True}, ((50, 0, 43), (7, 60, 80))),
    Folded(9, {}),
    Folded(7, {"window_size": (30, 5)}),
)


@pytest.mark.parametrize(
    ("arch", "folded"),
    [
        pytest.param(
            arch,
            folded,
            id=f"{arch}-{folded.ratio}-{'packed' if folded.lengths else 'dense'}",
            marks=[
                pytest.mark.xdist_group(f"folding-{arch}"),
                *([pytest.mark.slow] * (index > 1)),
            ],
        )
        for arch in ("sm_80", "sm_90a")
        for index, folded in enumerate(FOLDED)
    ],
)
def test_folded_heads_equal_those_with_keys_of_their_own(arch: str, folded: Folded) -> None:
    """Outputs bit for bit: the blocks of a row's keys are the same, whatever shares its tile, up to
    those past a window's far edge, which leave a row as it is."""
    ratio, options, lengths = folded
    sides = lengths or ((93,), (KEYS[arch],))
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
        with hopperflash.emulate(arch, schedule="lazy") as run:
            if lengths is None:
                tensors = [x[None] for x in (q, *keys_and_values)]
                found = hopperflash.flash_attn_func(*tensors, return_lse=True, **options)
            else:
                bounds = (max(side) for side in sides)
                found = hopperflash.flash_attn_varlen_func(
                    q, *keys_and_values, *offsets, *bounds, return_lse=True, **options
                )
        assert run.hazards == []
        if arch == "sm_80":
            assert run.counters["shared_bank_conflicts"] == 0
        results.append((run.launches[-1], found))
    (with_group, ours), (plain, theirs) = results
    assert f"group{ratio}" in with_group.kernel_name
    assert "group" not in plain.kernel_name
    assert torch.equal(ours[0], theirs[0])
    # Steps with and without a mask compute factors by different units, to the same accuracy.
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-6, atol=0)
