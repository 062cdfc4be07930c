"""The arithmetic of budgets, the verdicts it must give, and the tables it must pass."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from hopperflash.plan import BackwardConfig, ForwardConfig, POperand, arch_of
from hopperflash.plan import tiles_sm90 as table
from hopperflash.plan.budget import registers, shared_memory
from hopperflash.plan.feasibility import check
from hopperflash.plan.tiles import ANY, FULL, HEAD_DIMS, padded_head_dim
from hopperflash.problem import DType, MaskKind

SM90 = arch_of("sm_90a")
REGS, SMEM = POperand.REGISTERS, POperand.SHARED
FORWARD = ForwardConfig(128, 128, 128, 128, 2, 24, 240, REGS)
# Warpgroups stacked along the keys, P in registers; and splitting the columns, P in shared memory.
STACKED = BackwardConfig(64, 128, 128, 128, 2, 2, 1, 24, 240)
SPLIT = BackwardConfig(64, 64, 192, 128, 2, 1, 1, 24, 240)
QUERY_ROWS = BackwardConfig(64, 96, 192, 192, 2, 2, 2, 24, 240, query_rows=True)

HEAD_DIM_PAIRS = list(product(HEAD_DIMS, HEAD_DIMS))


def config(head_dim: int, tile_m: int, tile_n: int, p_operand: POperand) -> ForwardConfig:
    tile = table.ForwardTile(head_dim, head_dim, FULL, tile_m, tile_n, p_operand, source="test")
    return table.forward_config(tile, head_dim, head_dim)


def text_of(answer) -> str:
    assert not answer
    return "\n".join(answer.reasons)


@pytest.mark.parametrize("mask", ANY)
@pytest.mark.parametrize(("head_dim", "head_dim_v"), HEAD_DIM_PAIRS)
@pytest.mark.parametrize("plain", [True, False])
def test_every_pair_of_head_dims_is_feasible(head_dim, head_dim_v, mask, plain):
    forward = table.forward_tile(head_dim, head_dim_v, mask)
    backward = table.backward_tile(head_dim, head_dim_v, mask, plain)
    for tile, planned in (
        (forward, table.forward_config(forward, head_dim, head_dim_v)),
        (backward, table.backward_config(backward, head_dim, head_dim_v)),
    ):
        assert (planned.head_dim, planned.head_dim_v) == (head_dim, head_dim_v)
        assert tile.head_dim >= head_dim
        assert tile.head_dim_v >= head_dim_v
        for dtype in DType:
            assert check(planned, SM90, dtype).reasons == ()


def test_every_row_is_used():
    for tile in table.FORWARD_TILES:
        for mask in tile.masks:
            assert table.forward_tile(tile.head_dim, tile.head_dim_v, mask) is tile
    for tile in table.BACKWARD_TILES:
        dims = (tile.head_dim, tile.head_dim_v)
        for mask in tile.masks:
            found = [table.backward_tile(*dims, mask, plain) for plain in (False, True)]
            assert any(row is tile for row in found)


@pytest.mark.parametrize("head_dim", range(8, 257, 8))
def test_head_dims_are_padded_to_the_next_size(head_dim):
    padded = padded_head_dim(head_dim)
    assert padded >= head_dim
    assert all(size < head_dim for size in HEAD_DIMS if size < padded)


def test_head_dims_are_padded_apart():
    tile = table.forward_tile(72, 136, MaskKind.FULL)
    assert (tile.head_dim, tile.tile_n) == (192, 112)
    planned = table.forward_config(tile, 72, 136)
    assert (planned.head_dim, planned.head_dim_v) == (96, 192)


@pytest.mark.parametrize("mask", ANY)
@pytest.mark.parametrize("head_dims", [(192, 128), (136, 64)])
def test_a_narrow_v_has_a_row_of_its_own(head_dims, mask):
    tile = table.forward_tile(*head_dims, mask)
    assert (tile.tile_m, tile.tile_n, tile.p_operand) == (128, 128, REGS)


def test_head_dim_above_the_table():
    with pytest.raises(ValueError, match="head_dim 264 exceeds"):
        padded_head_dim(264)
    with pytest.raises(LookupError, match="head_dim_v 264"):
        table.backward_tile(64, 264, MaskKind.FULL)


def test_mask_outside_the_table(monkeypatch):
    rows = [replace(row, masks=FULL) for row in table.FORWARD_TILES]
    monkeypatch.setattr(table, "FORWARD_TILES", rows)
    with pytest.raises(LookupError, match="mask window"):
        table.forward_tile(64, 64, MaskKind.WINDOW)


def test_forward_shared_memory_by_hand():
    budget = shared_memory(replace(FORWARD, p_operand=SMEM), itemsize=2)
    assert budget["Q/O"] == 128 * 128 * 2
    assert budget["K"] == budget["V"] == 2 * 128 * 128 * 2
    assert budget["P"] == 128 * 128 * 2
    assert budget["barriers"] == 10 * 8
    assert budget.total == 1024 + 32768 + 65536 + 65536 + 32768


def test_output_wider_than_query_sets_the_shared_region():
    wide_v = shared_memory(replace(FORWARD, head_dim=64), itemsize=2)
    assert wide_v["Q/O"] == 128 * 128 * 2
    assert wide_v["K"] == 2 * 128 * 64 * 2


def test_backward_shared_memory_by_hand():
    budget = shared_memory(STACKED, itemsize=2)
    assert budget["barriers"] == 2 * (1 + 2) * 8
    assert budget["LSE"] == budget["delta"] == 2 * 64 * 4
    assert budget["K/dK"] == budget["V/dV"] == 128 * 128 * 2
    assert budget["Q"] == budget["dO"] == 2 * 64 * 128 * 2
    assert budget["P"] == 0
    assert budget["dS"] == 64 * 128 * 2
    # The barriers' 48 bytes end at 128, the statistics at 1152, so the tiles start at 2048.
    assert budget.total == 2048 + 4 * 32768 + 16384


def test_backward_shared_memory_where_p_is_shared():
    budget = shared_memory(replace(SPLIT, stages=1), itemsize=2)
    assert budget["P"] == budget["dS"] == 64 * 64 * 2
    assert budget["K/dK"] == budget["Q"] == 64 * 192 * 2
    assert budget["V/dV"] == budget["dO"] == 64 * 128 * 2
    # 32 bytes of barriers end at 128, the statistics of one stage at 640.
    assert budget.total == 1024 + 2 * 24576 + 2 * 16384 + 2 * 8192


def test_forward_registers_by_hand():
    budget = registers(FORWARD, SM90)
    (phase,) = budget.phases
    assert phase.fragments == (("acc_S", 64), ("acc_O", 64), ("P", 32))
    assert budget.total == 64 + 64 + 32 + 24
    assert budget.claimed == 128 * (24 + 2 * 240)
    assert budget.pool == 384 * 168
    assert registers(replace(FORWARD, p_operand=SMEM), SM90).peak["P"] == 0


def test_backward_registers_by_hand():
    budget = registers(replace(STACKED, tile_m=128, dq_warpgroups=2), SM90)
    softmax, gemm = budget.phases
    assert softmax.fragments == (("acc_dV", 64), ("acc_dK", 64), ("acc_S", 64), ("acc_dP", 64))
    assert gemm.fragments == (
        ("acc_dV", 64),
        ("acc_dK", 64),
        ("acc_dQ", 64),
        ("P", 32),
        ("dS", 32),
    )
    assert budget.total == 256 + 24


def test_a_warpgroup_that_computes_dQ_alone_needs_no_registers_for_P():
    _, gemm = registers(STACKED, SM90).phases
    assert gemm.fragments[2:] == (("acc_dQ", 64), ("P", 0), ("dS", 16))
    _, gemm = registers(replace(STACKED, dq_warpgroups=2), SM90).phases
    assert gemm.fragments[2:] == (("acc_dQ", 32), ("P", 16), ("dS", 16))


def test_registers_of_the_transpose_of_dQ_by_hand():
    """Of three parts of 64 x 48 a warpgroup has two, the other one."""
    config = replace(STACKED, head_dim=192, tile_m=48, dq_warpgroups=2, dq_swap_ab=True)
    assert [config.dq_parts(warpgroup) for warpgroup in range(3)] == [(0, 2), (1,), ()]
    softmax, gemm, parts = registers(config, SM90).phases
    assert softmax.fragments == (("acc_dV", 64), ("acc_dK", 96), ("acc_S", 24), ("acc_dP", 24))
    assert gemm.fragments[2:] == (("acc_dQ", 24), ("P", 0), ("dS", 12))
    assert parts.fragments[2:] == (("acc_dQ", 48),)


def test_registers_of_scores_with_queries_as_rows_by_hand():
    """Each warpgroup has all head dims of its 48 keys; P and dS are in shared memory."""
    softmax, gemm = registers(QUERY_ROWS, SM90).phases
    assert softmax.fragments == (("acc_dV", 72), ("acc_dK", 72), ("acc_S", 24), ("acc_dP", 24))
    assert gemm.fragments[2:] == (("acc_dQ", 48), ("P", 0), ("dS", 0))
    memory = shared_memory(QUERY_ROWS, 2)
    assert memory["P"] == memory["dS"] == 64 * 96 * 2
    assert [config.column_shares for config in (QUERY_ROWS, STACKED, SPLIT)] == [2, 1, 2]
    assert [config.row_warpgroups for config in (QUERY_ROWS, STACKED, SPLIT)] == [1, 2, 1]


def test_the_gemms_may_need_more_registers_than_the_softmax():
    budget = registers(SPLIT, SM90)
    assert budget.peak.fragments == (
        ("acc_dV", 32),
        ("acc_dK", 48),
        ("acc_dQ", 96),
        ("P", 0),
        ("dS", 0),
    )
    assert budget.total == 176 + 24


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
        ({"stages_kv": 4}, ["Q/O 32768 + K 131072 + V 131072 + P 0 = 295936 B", "232448 B"]),
        ({"registers_consumer": 236}, ["236 consumer registers", "multiple of 8"]),
        ({"registers_producer": 16}, ["16 producer registers", "24..256"]),
        ({"registers_producer": 40}, ["66560 registers", "of 64512", "384 threads"]),
        ({"tile_n": 208}, ["acc_S 104 + acc_O 64 + P 52 + overhead 24", "244 registers", "240"]),
    ],
)
def test_infeasible_forward_is_refused_with_the_numbers(change, numbers):
    text = text_of(check(replace(FORWARD, **change), SM90, DType.FLOAT16))
    for number in numbers:
        assert number in text


@pytest.mark.parametrize(
    ("given", "change", "numbers"),
    [
        (STACKED, {"tile_m": 80}, ["tile_m 80", "multiple of 64", "dQ's rows"]),
        (STACKED, {"tile_m": 128}, ["2 times 64 rows of dQ", "compute it: 1"]),
        (
            STACKED,
            {"tile_m": 192, "dq_warpgroups": 2},
            ["3 times 64 rows of dQ", "compute it: 2"],
        ),
        (STACKED, {"tile_m": 384}, ["tile_m 384", "256 rows of a TMA box", "16..256"]),
        (STACKED, {"head_dim": 96, "dq_swap_ab": True}, ["head_dim 96", "64: dQ^T's rows"]),
        (STACKED, {"tile_n": 96}, ["tile_n 96 is not 128", "2 warpgroups of 64 keys"]),
        (STACKED, {"key_warpgroups": 3}, ["2 consumer warpgroups", "the 3 stacked"]),
        (
            STACKED,
            {"head_dim": 80, "dq_warpgroups": 2},
            ["head_dim 80 / 2 warpgroups", "multiple of 16"],
        ),
        (
            QUERY_ROWS,
            {"tile_m": 80, "head_dim": 96, "key_warpgroups": 1},
            [
                "all 2 consumer warpgroups split the keys, not 1",
                "tile_m 80 is not a multiple of 64: rows of S",
                "head_dim 96 is not a multiple of 64: rows of S, dV^T or dK^T",
            ],
        ),
        (QUERY_ROWS, {"tile_n": 80}, ["tile_n 80 / 2 warpgroups", "multiple of 16"]),
        (SPLIT, {"head_dim_v": 80}, ["head_dim_v 80 / 2 warpgroups", "multiple of 16"]),
        (SPLIT, {"tile_m": 16}, ["tile_m 16 / 2 warpgroups", "multiple of 16"]),
        (STACKED, {"head_dim_v": 264}, ["head_dim_v 264", "16..256"]),
        (
            SPLIT,
            {"stages": 5},
            ["Q 122880 + dO 81920", "dS 8192 = 265216 B", "232448 B"],
        ),
        (STACKED, {"registers_producer": 40}, ["66560 registers", "of 64512"]),
        (
            STACKED,
            {"tile_m": 128, "dq_warpgroups": 2},
            [
                "acc_dV 64 + acc_dK 64 + acc_S 64 + acc_dP 64 + overhead 24 = 280 registers",
                "(softmax) and has 240",
            ],
        ),
        (
            SPLIT,
            {"head_dim": 256, "head_dim_v": 256, "stages": 1},
            ["acc_dV 64 + acc_dK 64 + acc_dQ 128", "(GEMM) and has 240"],
        ),
    ],
)
def test_infeasible_backward_is_refused_with_the_numbers(given, change, numbers):
    text = text_of(check(replace(given, **change), SM90, DType.FLOAT16))
    for number in numbers:
        assert number in text


@pytest.mark.parametrize(
    ("head_dim", "change", "number"),
    [
        (96, {"tile_m": 128, "dq_warpgroups": 2}, "= 248 registers"),
        (128, {"tile_m": 80}, "dQ's rows"),
        (128, {"tile_m": 128, "dq_warpgroups": 2}, "= 280 registers"),
        (192, {"tile_n": 128}, "= 280 registers"),
        (192, {"tile_m": 128}, "exceeds the 232448 B"),
        (256, {"stages": 3}, "exceeds the 232448 B"),
        (256, {"dq_warpgroups": 1}, "= 280 registers"),
    ],
)
def test_larger_backward_tiles_do_not_fit(head_dim, change, number):
    tile = table.backward_tile(head_dim, head_dim, MaskKind.FULL)
    larger = replace(table.backward_config(tile, head_dim, head_dim), **change)
    assert number in text_of(check(larger, SM90, DType.BFLOAT16))


def test_all_reasons_at_once():
    answer = check(replace(FORWARD, tile_n=264, registers_producer=20), SM90, DType.FLOAT16)
    assert len(answer.reasons) == 4
