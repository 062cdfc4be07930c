"""Every planned backward configuration compiles for sm_90a into what the plan says it is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest

from hopperflash.analysis import KernelResources, inspect_cubin
from hopperflash.plan import (
    BackwardConfig,
    KernelSpec,
    PostprocessConfig,
    PreprocessConfig,
    arch_of,
)
from hopperflash.plan.clusters import L2_AT_EASE, PAIR, l2_rate
from hopperflash.plan.config import AccumulatorOrder
from hopperflash.plan.family import POSTPROCESS, PREPROCESS
from hopperflash.plan.sm90 import SM90
from hopperflash.plan.tiles import HEAD_DIMS
from hopperflash.plan.tiles_sm90 import BACKWARD_TILES, BackwardTile, backward_config, backward_tile
from hopperflash.problem import DType, MaskKind, Signature
from hopperflash.runtime.compile import compile_kernel
from tests.support.configurations import EVERYTHING, NAMES, VARIANTS, Variant, params, walking

pytestmark = pytest.mark.compile

BF16, FP16 = DType.BFLOAT16, DType.FLOAT16
FEW = 128  # the head dim whose persistent kernel is compiled by default
# Loops over query tiles: those that an edge cuts and those between; a window has two edges.
CAPPED = Variant(MaskKind.CAUSAL, softcap=True)
LOOPS = {MaskKind.FULL: 2, MaskKind.CAUSAL: 2, MaskKind.WINDOW: 3}


def _spec(config: BackwardConfig, dtype: DType, variant: Variant) -> KernelSpec:
    return KernelSpec(SM90.backward, config, variant.signature(dtype), "sm_90a")


def _own(tile: BackwardTile, deterministic: bool = False) -> BackwardConfig:
    """The configuration of a row at its own head dims."""
    config = backward_config(tile, tile.head_dim, tile.head_dim_v)
    return replace(config, deterministic=deterministic)


def _takes(tile: BackwardTile, variant: Variant, deterministic: bool = False) -> bool:
    """Whether problems of the row's own head dims and this variant get the row."""
    plain = not variant.softcap and deterministic + variant.packed <= 1
    return tile == backward_tile(tile.head_dim, tile.head_dim_v, variant.mask, plain)


def _paired(tile: BackwardTile) -> bool:
    """Whether L2 would bind its kernels."""
    return l2_rate(_own(tile), BF16.itemsize) > L2_AT_EASE[BackwardConfig]


def _lightest(tile: BackwardTile, mask: MaskKind) -> Variant:
    return Variant(mask, softcap=not _takes(tile, Variant(mask)))


def _heaviest(tile: BackwardTile, deterministic: bool = False) -> Variant:
    """All that a row is for."""
    packed = not (tile.plain_only and deterministic)
    return Variant(tile.masks[-1], softcap=not tile.plain_only, packed=packed)


def _sampled() -> Iterator[KernelSpec]:
    """Each row at its heaviest, in an order of additions; one too with CTAs of several tiles."""
    for tile in BACKWARD_TILES:
        yield _spec(_own(tile, deterministic=True), FP16, _heaviest(tile, True))
        if _paired(tile):
            yield _spec(replace(_own(tile), cluster_n=PAIR), BF16, Variant(MaskKind.WINDOW))
        if tile.head_dim == FEW:
            yield walking(_spec(_own(tile, deterministic=True), FP16, _heaviest(tile, True)))


def _covering() -> Iterator[KernelSpec]:
    """Each row with every mask and dtype and little else, in variants with and without an order of
    additions, and with fewer gradients; then unequal head dims."""
    for tile in BACKWARD_TILES:
        for dtype, mask in product(DType, tile.masks):
            yield _spec(_own(tile), dtype, _lightest(tile, mask))
        for variant, deterministic in product(VARIANTS, (False, True)):
            if _takes(tile, variant, deterministic):
                yield _spec(_own(tile, deterministic), FP16, variant)
        yield _spec(_own(tile, deterministic=True), BF16, _heaviest(tile, True))
        if not tile.plain_only:
            yield walking(_spec(_own(tile, deterministic=True), FP16, _heaviest(tile, True)))
        yield walking(_spec(_own(tile), BF16, _lightest(tile, tile.masks[0])))
        yield _spec(replace(_own(tile), exact_head_dim=False), BF16, _heaviest(tile))
        if not tile.plain_only:
            narrower = replace(_own(tile, deterministic=True), exact_head_dim=False)
            yield _spec(narrower, BF16, _heaviest(tile, True))
        if _paired(tile):
            yield _spec(replace(_own(tile), cluster_n=PAIR), FP16, CAPPED)
            for mask in tile.masks:
                yield _spec(replace(_own(tile), cluster_n=PAIR), BF16, Variant(mask))
        if not tile.plain_only:
            for gradients, cap in product((("dq",), ("dk", "dv")), (True, False)):
                variant = Variant(tile.masks[-1], softcap=cap, packed=True)
                yield _spec(replace(_own(tile), gradients=gradients), FP16, variant)
    for pair in ((192, 128), (64, 128), (96, 64), (64, 256), (256, 64)):
        for variant in (EVERYTHING, Variant(MaskKind.CAUSAL)):
            tile = backward_tile(*pair, variant.mask, plain=not variant.softcap)
            yield _spec(backward_config(tile, *pair), BF16, variant)


def _clean(spec: KernelSpec) -> KernelResources:
    """The kernel's resources, once it is shown to use no local memory."""
    (kernel,) = inspect_cubin(compile_kernel(spec).artifacts.CUBIN)
    assert kernel.stack_bytes == kernel.local_bytes == 0
    assert kernel.sass.count("LDL") == kernel.sass.count("STL") == 0
    assert kernel.registers * spec.config.threads <= arch_of(spec.target).registers_per_sm
    return kernel


@pytest.mark.parametrize("spec", params(_sampled(), _covering()))
def test_configuration_compiles_clean(spec: KernelSpec) -> None:
    kernel, config = _clean(spec), spec.config
    assert kernel.name.startswith("hopperflash_bwd_sm90_")
    sass = kernel.sass
    wanted = ["HGMMA", "UTMALDG", "UBLKCP", "USETMAXREG"]
    wanted += ["REDG.E.ADD.F32x4"] if config.needs("dq") else []
    wanted += ["UTMASTG"] if config.needs("dk") or config.needs("dv") else []
    for opcode in wanted:
        assert sass.count(opcode) > 0, f"no {opcode}"
    assert sass.count("HMMA") == 0
    # A GEMM is one group of instructions in flight, and those of S and dP share a fence: more mean
    # that ptxas serialised them.
    loops, gemms = LOOPS[spec.signature.mask_kind], 1 + len({"dk", "dv"} & set(config.gradients))
    warpgroups = 1 if config.dq_alike else config.consumer_warpgroups
    fences = loops * sum(gemms + len(config.dq_parts(w)) for w in range(warpgroups))
    assert sass.count("WARPGROUP.ARRIVE") == fences
    # Waits for S, for dP and for what is left; one for dQ, or where it comes last for dV, dK and
    # each of its parts.
    parts = [len(config.dq_parts(w)) for w in range(warpgroups)]
    waits = sum(3 + (p if config.dq_alike else p + bool(p)) for p in parts)
    assert sass.count("WARPGROUP.DEPBAR") <= loops * waits


@pytest.mark.parametrize("dtype", DType, ids=NAMES.get)
def test_kernels_around_it_compile_clean(dtype: DType) -> None:
    signature = Signature(dtype, MaskKind.FULL, softcap=False)
    for ref, config in (
        (PREPROCESS, PreprocessConfig(128, AccumulatorOrder.FRAGMENTS)),
        (PREPROCESS, PreprocessConfig(64, AccumulatorOrder.ROWS)),
        (PREPROCESS, PreprocessConfig(64, None)),
        (POSTPROCESS, PostprocessConfig(128, AccumulatorOrder.FRAGMENTS)),
        (POSTPROCESS, PostprocessConfig(32, AccumulatorOrder.ROWS)),
    ):
        kernel = _clean(KernelSpec(ref, config, signature, "sm_90a"))
        assert kernel.sass.count("LDG") > 0
        # Rows move 16 bytes a lane.
        assert any(".128" in opcode for opcode in kernel.sass.opcodes if opcode.startswith("LDG"))


def test_a_tile_holds_every_head_dim() -> None:
    assert {tile.head_dim for tile in BACKWARD_TILES} == set(HEAD_DIMS)


def test_each_row_is_asked_for_what_it_is_for() -> None:
    for tile in BACKWARD_TILES:
        assert _takes(tile, _heaviest(tile)), tile
