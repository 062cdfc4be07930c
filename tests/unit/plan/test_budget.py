"""The arithmetic of budgets, the verdicts it must give, and the table it must pass."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hopperflash.plan import ForwardConfig, POperand, arch_of
from hopperflash.plan import tiles_sm90 as table
from hopperflash.plan.budget import check, registers, shared_memory
from hopperflash.problem import DType, MaskKind

SM90 = arch_of("sm_90a")
REGS, SMEM = POperand.REGISTERS, POperand.SHARED
BASE = ForwardConfig(128, 128, 128, 128, 2, 24, 240, REGS)


def config(head_dim: int, tile_m: int, tile_n: int, p_operand: POperand) -> ForwardConfig:
    tile = table.Tile(head_dim, table.FULL, tile_m, tile_n, p_operand, "test")
    return table.forward_config(tile)


@pytest.mark.parametrize("dtype", DType)
@pytest.mark.parametrize("tile", table.FORWARD_TILES, ids=str)
def test_every_row_is_feasible(tile, dtype):
    assert check(table.forward_config(tile), SM90, dtype).reasons == ()


@pytest.mark.parametrize("mask", [MaskKind.FULL, MaskKind.CAUSAL])
@pytest.mark.parametrize("head_dim", range(8, 257, 8))
def test_every_head_dim_has_one_row_that_holds_it(head_dim, mask):
    tile = table.forward_tile(head_dim, mask)
    same = [t for t in table.FORWARD_TILES if t.head_dim == tile.head_dim and mask in t.masks]
    assert same == [tile]
    assert tile.head_dim >= head_dim
    smaller = [t.head_dim for t in table.FORWARD_TILES if t.head_dim < tile.head_dim]
    assert all(size < head_dim for size in smaller)


def test_head_dim_above_the_table():
    with pytest.raises(ValueError, match="head_dim 264 exceeds"):
        table.forward_tile(264, MaskKind.FULL)


def test_mask_outside_the_table():
    with pytest.raises(LookupError, match="mask window"):
        table.forward_tile(64, MaskKind.WINDOW)


def test_shared_memory_by_hand():
    budget = shared_memory(replace(BASE, p_operand=SMEM), itemsize=2)
    assert budget.q_and_o == 128 * 128 * 2
    assert budget.k == budget.v == 2 * 128 * 128 * 2
    assert budget.p == 128 * 128 * 2
    assert budget.barriers == 10 * 8
    assert budget.total == budget.q_and_o + budget.k + budget.v + budget.p + 1024


def test_output_wider_than_query_sets_the_shared_region():
    wide_v = shared_memory(replace(BASE, head_dim=64), itemsize=2)
    assert wide_v.q_and_o == 128 * 128 * 2
    assert wide_v.k == 2 * 128 * 64 * 2


def test_registers_by_hand():
    budget = registers(BASE, SM90)
    assert (budget.acc_S, budget.acc_O, budget.P) == (64, 64, 32)
    assert budget.claimed == 128 * (24 + 2 * 240)
    assert budget.pool == 384 * 168
    assert registers(replace(BASE, p_operand=SMEM), SM90).P == 0


# Verdicts of ptxas on altered FA4 forwards: spills and serialised wgmma where the answer is no.
@pytest.mark.parametrize(
    ("args", "feasible"),
    [
        ((96, 192, 144, REGS), False),
        ((96, 192, 128, REGS), False),
        ((64, 192, 192, REGS), False),
        ((64, 192, 192, SMEM), True),
        ((64, 128, 192, REGS), True),
        ((128, 128, 160, REGS), True),
        ((128, 128, 176, REGS), True),
        ((128, 128, 192, REGS), True),
        ((128, 192, 128, SMEM), True),
    ],
)
def test_agrees_with_the_compiler(args, feasible):
    assert check(config(*args), SM90, DType.BFLOAT16).ok is feasible


@pytest.mark.parametrize(
    ("change", "numbers"),
    [
        ({"tile_m": 192}, ["tile_m 192", "multiple of 128", "2 consumer warpgroups"]),
        ({"tile_m": 384}, ["tile_m 384", "256 rows of a TMA box"]),
        ({"tile_n": 120}, ["tile_n 120", "16..256"]),
        ({"tile_n": 272}, ["tile_n 272", "16..256"]),
        ({"head_dim": 72}, ["head_dim 72", "multiple of 16"]),
        ({"head_dim_v": 264}, ["head_dim_v 264", "16..256"]),
        ({"stages_kv": 4}, ["295936 B", "Q/O 32768, K 131072, V 131072, P 0", "232448 B"]),
        ({"registers_consumer": 236}, ["236 consumer registers", "multiple of 8"]),
        ({"registers_producer": 16}, ["16 producer registers", "24..256"]),
        ({"registers_producer": 40}, ["66560 registers", "of 64512", "384 threads"]),
        ({"tile_n": 208}, ["acc_S 104, acc_O 64, P 52, overhead 24", "244 registers", "240"]),
    ],
)
def test_infeasible_is_refused_with_the_numbers(change, numbers):
    answer = check(replace(BASE, **change), SM90, DType.FLOAT16)
    assert not answer
    text = "\n".join(answer.reasons)
    for number in numbers:
        assert number in text


def test_all_reasons_at_once():
    answer = check(replace(BASE, tile_n=264, registers_producer=20), SM90, DType.FLOAT16)
    assert len(answer.reasons) == 4
