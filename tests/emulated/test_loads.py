"""What the kernels load: tiles that hold a visible pair, each once, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import pytest
import torch

import hopperflash
from hopperflash.plan import LaunchPlan
from hopperflash.plan.config import (
    BackwardConfig,
    BackwardConfigSm80,
    ForwardConfig,
    ForwardConfigSm80,
)
from hopperflash.problem import MaskSpec
from hopperflash.reference import hidden_pairs

pytestmark = [pytest.mark.emulated, pytest.mark.xdist_group("loads")]

MAIN_CONFIGS = (ForwardConfig, BackwardConfig, ForwardConfigSm80, BackwardConfigSm80)
HEAD_DIM = 64  # one TMA box a tile
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (150, 40)},
    "left": {"window_size": (100, -1)},
    "right": {"window_size": (-1, 30)},
    "causal-window": {"causal": True, "window_size": (200, -1)},
    "diagonal": {"window_size": (0, 0)},
}
DENSE = ((300, 700), (500, 300))
PACKED = ((5, 200), (0, 64), (300, 0), (130, 700))  # (queries, keys) of each sequence
WHOLE = (256, 640)  # multiples of every Ampere tile's


def _rows(length: int, heads: int = 1) -> torch.Tensor:
    return torch.randn(length, heads, HEAD_DIM).bfloat16().requires_grad_()


def _visible_tiles(
    mask: MaskSpec, lengths: tuple[int, int], tile_m: int, tile_n: int
) -> torch.Tensor:
    """Bool (query blocks, key blocks): which hold a visible pair, found pair by pair."""
    blocks = -(-lengths[0] // tile_m), -(-lengths[1] // tile_n)
    padded = torch.zeros(blocks[0] * tile_m, blocks[1] * tile_n, dtype=torch.bool)
    padded[: lengths[0], : lengths[1]] = ~hidden_pairs(mask, *lengths)
    return padded.view(blocks[0], tile_m, blocks[1], tile_n).any(dim=3).any(dim=1)


def _mask(options: Mapping[str, Any]) -> MaskSpec:
    return MaskSpec.canonical(options.get("causal", False), options.get("window_size", (-1, -1)))


def _main_config(plan: LaunchPlan) -> Any:
    (config,) = (c.spec.config for c in plan.calls if isinstance(c.spec.config, MAIN_CONFIGS))
    return config


def _expected(
    config: ForwardConfig | BackwardConfig,
    options: Mapping[str, Any],
    lengths: tuple[int, int],
    ratio: int,
) -> int:
    """Loads of a sequence and a key head, that of `ratio` query heads. Forward, all of them in a
    tile: Q of tiles that see a key, K and V of each visible tile. Backward, one after the other:
    K and V of tiles that are seen, Q, LSE, dO and delta of each visible tile."""
    if isinstance(config, ForwardConfig):
        assert config.group == ratio
        visible = _visible_tiles(_mask(options), lengths, config.queries, config.tile_n)
        return int(visible.any(dim=1).sum() + 2 * visible.sum())
    visible = _visible_tiles(_mask(options), lengths, config.tile_m, config.tile_n)
    return int(2 * visible.any(dim=0).sum() + ratio * 4 * visible.sum())


def _check(
    tensors: tuple[torch.Tensor, ...], lengths: tuple[tuple[int, int], ...], options: dict[str, Any]
) -> None:
    packed = tensors[0].dim() == 3
    heads_q, heads_k = (x.shape[-2] for x in tensors[:2])
    names = ("cu_seqlens_q", "cu_seqlens_k") if packed else ()
    offsets = [
        torch.tensor([0, *accumulate(side)], dtype=torch.int32)
        for side in zip(*lengths, strict=True)
    ]
    given = dict(zip(names, offsets, strict=False))
    for direction in ("forward", "backward"):
        plan = hopperflash.make_plan(
            *tensors, arch="sm_90a", direction=direction, **options, **given
        )
        config = _main_config(plan)
        with hopperflash.emulate("sm_90a", hazards="basic") as run:
            if packed:
                out = hopperflash.flash_attn_varlen_func(*tensors, *offsets, 0, 0, **options)
            else:
                out = hopperflash.flash_attn_func(*tensors, **options)
            loads = run.counters["tma_loads"]
            if direction == "backward":
                out.sum().backward()
                loads = run.counters["tma_loads"] - loads
        ratio = heads_q // heads_k
        assert loads == heads_k * sum(_expected(config, options, x, ratio) for x in lengths)


@pytest.mark.parametrize("lengths", DENSE, ids="{0[0]}x{0[1]}".format)
@pytest.mark.parametrize("mask", MASKS)
def test_dense_loads_only_what_is_visible(mask: str, lengths: tuple[int, int]) -> None:
    q, k, v = (_rows(n)[None] for n in (lengths[0], lengths[1], lengths[1]))
    _check((q, k, v), (lengths,), MASKS[mask])


@pytest.mark.parametrize("mask", MASKS)
def test_packed_loads_only_what_is_visible(mask: str) -> None:
    total_q, total_k = (sum(side) for side in zip(*PACKED, strict=True))
    _check((_rows(total_q), _rows(total_k), _rows(total_k)), PACKED, MASKS[mask])


def test_folded_heads_load_their_keys_once() -> None:
    q, k, v = _rows(150, 6)[None], _rows(300, 2)[None], _rows(300, 2)[None]
    _check((q, k, v), ((150, 300),), MASKS["causal"])


def _expected_bytes(
    config: ForwardConfigSm80 | BackwardConfigSm80, options: Mapping[str, Any]
) -> int:
    """Of tiles as in `_expected`, all of them whole."""
    visible = _visible_tiles(_mask(options), WHOLE, config.tile_m, config.tile_n)
    queries, keys = (tile * HEAD_DIM * 2 for tile in (config.tile_m, config.tile_n))
    if isinstance(config, ForwardConfigSm80):
        return int(queries * visible.any(dim=1).sum() + 2 * keys * visible.sum())
    statistics = 2 * config.tile_m * 4
    seen = visible.any(dim=0).sum()
    return int(2 * keys * seen + (2 * queries + statistics) * visible.sum())


@pytest.mark.parametrize("mask", ["full", "causal", "window"])
def test_ampere_loads_only_what_is_visible(mask: str) -> None:
    """In bytes, for its threads copy tiles piece by piece."""
    q, k, v = (_rows(n)[None] for n in (WHOLE[0], WHOLE[1], WHOLE[1]))
    with hopperflash.emulate("sm_80", hazards="basic") as run:
        hopperflash.flash_attn_func(q, k, v, **MASKS[mask]).sum().backward()
    for direction, part in (("forward", "_fwd_sm80"), ("backward", "_bwd_sm80")):
        plan = hopperflash.make_plan(q, k, v, arch="sm_80", direction=direction, **MASKS[mask])
        (counters,) = (found for name, found in run.kernels.items() if part in name)
        assert counters["global_load_bytes"] == _expected_bytes(_main_config(plan), MASKS[mask])
