"""Ampere tiles: every row fits its parts, the arithmetic by hand, and refusals with numbers."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from hopperflash.plan import BackwardConfigSm80, ForwardConfigSm80, arch_of
from hopperflash.plan import tiles_sm80 as table
from hopperflash.plan.budget_sm80 import registers, shared_memory
from hopperflash.plan.feasibility_sm80 import check
from hopperflash.plan.tiles import ANY, HEAD_DIMS
from hopperflash.problem import DType

SM80, SM86 = arch_of("sm_80"), arch_of("sm_86")
# One part for each table.
PARTS = (SM80, SM86, arch_of("sm_100a"), arch_of("sm_120a"))
FORWARD = ForwardConfigSm80(128, 64, 128, 128, warps=8, q_in_registers=True)
BACKWARD = BackwardConfigSm80(64, 128, 128, 128, warps=8, key_warps=8)
SPLIT = BackwardConfigSm80(64, 64, 192, 128, warps=8, key_warps=4)

HEAD_DIM_PAIRS = list(product(HEAD_DIMS, HEAD_DIMS))


@pytest.mark.parametrize("arch", PARTS, ids=lambda arch: arch.name)
@pytest.mark.parametrize("mask", ANY)
@pytest.mark.parametrize(("head_dim", "head_dim_v"), HEAD_DIM_PAIRS)
def test_every_pair_of_head_dims_is_feasible(head_dim, head_dim_v, mask, arch):
    forward = table.forward_tile(head_dim, head_dim_v, mask, arch)
    backward = table.backward_tile(head_dim, head_dim_v, mask, arch)
    for tile, planned in (
        (forward, table.forward_config(forward, head_dim, head_dim_v)),
        (backward, table.backward_config(backward, head_dim, head_dim_v)),
    ):
        assert (planned.head_dim, planned.head_dim_v) == (head_dim, head_dim_v)
        assert tile.head_dim >= head_dim
        assert tile.head_dim_v >= head_dim_v
        for dtype in DType:
            assert check(planned, arch, dtype).reasons == ()


@pytest.mark.parametrize("arch", PARTS, ids=lambda arch: arch.name)
def test_every_row_is_used(arch):
    for rows, lookup in (
        (table.table_of(arch).forward, table.forward_tile),
        (table.table_of(arch).backward, table.backward_tile),
    ):
        for tile in rows:
            for mask in tile.masks:
                assert lookup(tile.head_dim, tile.head_dim_v, mask, arch) is tile


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("sm_80", "sm_87"), table.LARGE),
        (("sm_86", "sm_89"), table.SMALL),
        (("sm_90a", "sm_100a", "sm_103a"), table.NEWER_LARGE),
        (("sm_120a", "sm_121a"), table.NEWER_SMALL),
    ],
)
def test_generation_and_shared_memory_decide_the_table(names, expected):
    for name in names:
        assert table.table_of(arch_of(name)) is expected


def test_no_table_for_less():
    with pytest.raises(LookupError, match="65536 B"):
        table.table_of(replace(SM86, smem_bytes_per_block=65536))


def test_forward_shared_memory_by_hand():
    budget = shared_memory(FORWARD, itemsize=2)
    assert budget["Q/O"] == 128 * 128 * 2
    assert budget["K"] == budget["V"] == 2 * 64 * 128 * 2
    assert budget.total == 32768 + 2 * 32768
    wide_v = shared_memory(replace(FORWARD, head_dim=64, stages_kv=3), itemsize=2)
    assert wide_v["Q/O"] == 128 * 128 * 2
    assert wide_v["K"] == 3 * 64 * 64 * 2


def test_backward_shared_memory_by_hand():
    budget = shared_memory(SPLIT, itemsize=2)
    assert budget["K/dK"] == 64 * 192 * 2
    assert budget["V/dV"] == 64 * 128 * 2
    assert budget["Q"] == 2 * 64 * 192 * 2
    assert budget["dO"] == 2 * 64 * 128 * 2
    assert budget["P/dS"] == 64 * 64 * 2
    assert budget["LSE"] == budget["delta"] == 2 * 64 * 4
    assert budget.total == 24576 + 16384 + 49152 + 32768 + 8192 + 2 * 512


def test_forward_registers_by_hand():
    scores, output = registers(FORWARD, SM80).phases
    # Q's eight k-steps stay; K holds one k-step of eight 8-column operands.
    assert scores.fragments == (("acc_O", 64), ("Q", 32), ("acc_S", 32), ("K", 16))
    assert output.fragments == (("acc_O", 64), ("Q", 32), ("P", 16), ("V", 32))
    scores, _ = registers(replace(FORWARD, q_in_registers=False, warps=4), SM80).phases
    assert scores.fragments == (("acc_O", 128), ("acc_S", 64), ("Q", 8), ("K", 16))


def test_backward_registers_by_hand():
    scores, values, queries = registers(BACKWARD, SM80).phases
    assert scores.fragments[:4] == (("acc_dV", 64), ("acc_dK", 64), ("acc_S", 32), ("acc_dP", 32))
    assert values.fragments[2:] == (("dS", 32), ("P", 16), ("B", 32))
    assert queries.fragments[2:] == (("acc_dQ", 32), ("A", 4), ("B", 16))
    assert registers(BACKWARD, SM80).total == 192 + 4 + 16 + 24
    # P through shared memory is an A operand of one k-step.
    assert registers(SPLIT, SM80).phases[1].fragments[2:] == (("dS", 16), ("A", 4), ("B", 24))


def test_eight_columns_of_scores_a_warp_are_enough():
    """8 warps on a 32 x 32 tile: two along the keys, and each has a quarter of the 32 queries."""
    config = BackwardConfigSm80(32, 32, 256, 256, warps=8, key_warps=2)
    assert config.score_columns == 8
    assert check(config, SM86, DType.BFLOAT16).reasons == ()
    assert registers(config, SM86).phases[0].fragments[-1] == ("B", 2)
    assert SPLIT.score_columns == BACKWARD.score_columns == 16
    # 24 columns are neither one mma.sync nor pairs of them.
    refused = check(replace(config, tile_m=96), SM80, DType.BFLOAT16).reasons
    assert "tile_m 96 is not a multiple of 64: 4 warps" in " ".join(refused)


def test_threads_share_the_register_file():
    assert registers(replace(FORWARD, warps=8), SM80).limit == 255
    assert registers(replace(FORWARD, warps=16), SM80).limit == 128


# Verdicts of ptxas: these spill.
@pytest.mark.parametrize(
    "config",
    [
        ForwardConfigSm80(128, 128, 64, 64, warps=4, q_in_registers=True),
        BackwardConfigSm80(32, 128, 192, 192, warps=8, key_warps=8),
        BackwardConfigSm80(32, 64, 192, 192, warps=4, key_warps=4),
    ],
)
def test_agrees_with_the_compiler(config):
    assert "registers" in "\n".join(check(config, SM80, DType.BFLOAT16).reasons)


@pytest.mark.parametrize(
    ("given", "change", "numbers"),
    [
        (FORWARD, {"tile_m": 64}, ["tile_m 64 is not a multiple of 128", "8 warps along the q"]),
        (FORWARD, {"tile_n": 24}, ["tile_n 24 is not a multiple of 16", "ldmatrix"]),
        (FORWARD, {"head_dim": 72}, ["head_dim 72 is not a multiple of 16"]),
        (FORWARD, {"stages_kv": 1}, ["1 stages", "2 at least"]),
        (
            FORWARD,
            {"head_dim": 96, "tile_n": 32},
            ["tile_n 32 is not a multiple of 64", "rows of 32 elements (head_dim 96)", "256 thr"],
        ),
        (FORWARD, {"stages_kv": 5}, ["Q/O 32768 + K 81920 + V 81920 = 196608 B", "166912 B"]),
        (FORWARD, {"warps": 4}, ["acc_O 128 + Q 64", "registers (Q K^T) and has 255"]),
        (BACKWARD, {"key_warps": 3}, ["8 warps do not divide by the 3"]),
        (BACKWARD, {"tile_n": 64}, ["tile_n 64 is not a multiple of 128", "8 warps along the k"]),
        (SPLIT, {"tile_m": 48}, ["tile_m 48 is not a multiple of 32: 2 warps", "(dQ)"]),
        (SPLIT, {"head_dim": 96, "tile_m": 32}, ["head_dim 96 is not a multiple of 64: 4 warps"]),
        (BACKWARD, {"tile_m": 128}, ["acc_S 64 + acc_dP 64", "(scores) and has 255"]),
        (SPLIT, {"stages": 4}, ["Q 98304 + dO 65536", "exceeds the 166912 B"]),
    ],
)
def test_infeasible_is_refused_with_the_numbers(given, change, numbers):
    answer = check(replace(given, **change), SM80, DType.FLOAT16)
    assert not answer
    text = "\n".join(answer.reasons)
    for number in numbers:
        assert number in text
