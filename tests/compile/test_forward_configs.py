"""Every planned forward configuration compiles for sm_90a into what the plan says it is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest

from hopperflash.analysis import inspect_cubin
from hopperflash.analysis.loops import tensor_loops
from hopperflash.plan import KernelSpec, arch_of
from hopperflash.plan.clusters import L2_AT_EASE, PAIR, l2_rate
from hopperflash.plan.config import ForwardConfig, Scheduler
from hopperflash.plan.sm90 import SM90
from hopperflash.plan.tiles_sm90 import FORWARD_TILES, ForwardTile, forward_config, forward_tile
from hopperflash.problem import DType, MaskKind
from hopperflash.runtime.compile import compile_kernel
from tests.support.configurations import GROUP, VARIANTS, Variant, params, walking
from tests.support.sass import HOPPER_ONLY, hopper_only

pytestmark = pytest.mark.compile

BF16, FP16 = DType.BFLOAT16, DType.FLOAT16
FEW = 128  # the head dim whose persistent kernels are compiled by default


def _spec(tile: ForwardTile, dtype: DType, variant: Variant, group: int = 1) -> KernelSpec:
    config = replace(forward_config(tile, tile.head_dim, tile.head_dim_v), group=group)
    return KernelSpec(SM90.forward, config, variant.signature(dtype), "sm_90a")


def _takes(tile: ForwardTile, variant: Variant) -> bool:
    """Whether problems of the row's own head dims and this variant get the row."""
    return tile == forward_tile(tile.head_dim, tile.head_dim_v, variant.mask)


def _heaviest(tile: ForwardTile) -> Variant:
    """All that a row is for; the last of its masks has the most loops."""
    return Variant(tile.masks[-1], softcap=True, packed=True)


def _paired(spec: KernelSpec) -> KernelSpec:
    """The same with CTAs that load together."""
    assert isinstance(spec.config, ForwardConfig)
    return replace(spec, config=replace(spec.config, cluster_m=PAIR))


def _pairs(tile: ForwardTile) -> Iterator[KernelSpec]:
    """Those that plans have: of dense sequences without a window."""
    config = forward_config(tile, tile.head_dim, tile.head_dim_v)
    for mask in tile.masks:
        if (
            mask is not MaskKind.WINDOW
            and l2_rate(config, BF16.itemsize) > L2_AT_EASE[ForwardConfig]
        ):
            yield _paired(_spec(tile, FP16, Variant(mask, softcap=True), GROUP))
            yield _paired(_spec(tile, BF16, Variant(mask)))
            if mask is MaskKind.FULL:
                yield walking(_paired(_spec(tile, BF16, Variant(mask))))


def _sampled() -> Iterator[KernelSpec]:
    """Each row at its heaviest: folded heads, and fp16, have taken the most registers. Some of them
    with CTAs of several tiles, or in pairs."""
    for tile in FORWARD_TILES:
        yield _spec(tile, FP16, _heaviest(tile), GROUP)
        if tile.head_dim == FEW:
            yield walking(_spec(tile, FP16, _heaviest(tile), GROUP), Scheduler.DYNAMIC)
            yield from _pairs(tile)


def _covering() -> Iterator[KernelSpec]:
    """Each row with every mask and dtype and little else, folded in variants, at its heaviest."""
    for tile in FORWARD_TILES:
        for dtype, mask in product(DType, tile.masks):
            yield _spec(tile, dtype, Variant(mask))
        for variant in VARIANTS:
            if _takes(tile, variant):
                yield _spec(tile, FP16, variant, GROUP)
        yield _spec(tile, BF16, _heaviest(tile))
        for scheduler in (Scheduler.PERSISTENT, Scheduler.DYNAMIC):
            yield walking(_spec(tile, FP16, _heaviest(tile), GROUP), scheduler)
            yield walking(_spec(tile, BF16, Variant(tile.masks[0])), scheduler)
        yield from _pairs(tile)


@pytest.mark.parametrize("spec", params(_sampled(), _covering()))
def test_configuration_compiles_clean(spec: KernelSpec) -> None:
    (kernel,) = inspect_cubin(compile_kernel(spec).artifacts.CUBIN)
    assert kernel.name.startswith("hopperflash_fwd_sm90_")
    assert kernel.stack_bytes == 0
    assert kernel.local_bytes == 0
    assert kernel.registers * spec.config.threads <= arch_of(spec.target).registers_per_sm
    sass = kernel.sass
    assert sass.count("LDL") == sass.count("STL") == 0
    for opcode in ("HGMMA", "UTMALDG", "UTMASTG", "USETMAXREG"):
        assert sass.count(opcode) > 0, f"no {opcode}"
    assert sass.count("HMMA") == 0
    # What the Ampere tests look for is found here; bulk copies are not used.
    absent = {"UBLK"} if spec.config.cluster_m > 1 else {"UBLK", "UCGABAR"}
    assert hopper_only(sass) == {*HOPPER_ONLY} - absent


@pytest.mark.parametrize(("head_dim", "turns"), [(128, 1), (256, 0)])
def test_warpgroups_take_turns_with_their_gemms(head_dim: int, turns: int) -> None:
    """A wait for the turn and an arrival at the next one's in every step, as far as it pays."""
    tile = forward_tile(head_dim, head_dim, MaskKind.CAUSAL)
    spec = _spec(tile, BF16, Variant(MaskKind.CAUSAL))
    (kernel,) = inspect_cubin(compile_kernel(spec).artifacts.CUBIN)
    loops = tensor_loops(kernel.sass)
    assert len(loops) == 2
    for loop in loops:
        opcodes = [i.opcode for i in loop.instructions]
        assert sum(opcode.startswith("BAR.SYNC") for opcode in opcodes) == turns
        assert sum(opcode.startswith("BAR.ARV") for opcode in opcodes) == turns


def test_each_row_is_asked_for_what_it_is_for() -> None:
    for tile in FORWARD_TILES:
        assert _takes(tile, _heaviest(tile)), tile
