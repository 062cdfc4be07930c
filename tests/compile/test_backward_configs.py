"""Every planned backward configuration compiles for sm_90a into what the plan says it is."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from hopperflash.analysis import KernelResources, inspect_cubin
from hopperflash.plan import (
    BackwardConfig,
    KernelSpec,
    PostprocessConfig,
    PreprocessConfig,
    arch_of,
)
from hopperflash.plan.family import POSTPROCESS, PREPROCESS
from hopperflash.plan.sm90 import SM90
from hopperflash.plan.tiles import HEAD_DIMS
from hopperflash.plan.tiles_sm90 import BACKWARD_TILES, backward_config, backward_tile
from hopperflash.problem import DType, MaskKind, Signature
from hopperflash.runtime.compile import compile_kernel

pytestmark = pytest.mark.compile

NAMES = {DType.BFLOAT16: "bf16", DType.FLOAT16: "fp16"}
# Over masked and over unmasked query tiles; those at a window's far edge have a loop of their own.
LOOPS = {MaskKind.FULL: 2, MaskKind.CAUSAL: 2, MaskKind.WINDOW: 3}


def _spec(config: BackwardConfig, dtype: DType, mask: MaskKind) -> KernelSpec:
    return KernelSpec(SM90.backward, config, Signature(dtype, mask, softcap=False), "sm_90a")


def _specs() -> list[KernelSpec]:
    """Every tile with every dtype and mask at its own head dims; unequal head dims, an order of
    additions and fewer gradients once for each tile."""
    specs = []
    for tile in BACKWARD_TILES:
        config = backward_config(tile, tile.head_dim, tile.head_dim_v)
        specs += [_spec(config, dtype, mask) for dtype, mask in product(DType, tile.masks)]
        specs.append(_spec(replace(config, deterministic=True), DType.BFLOAT16, MaskKind.CAUSAL))
        for gradients in (("dq",), ("dk", "dv")):
            few = replace(config, gradients=gradients)
            specs.append(_spec(few, DType.FLOAT16, MaskKind.FULL))
    for head_dim, head_dim_v in ((192, 128), (64, 128), (96, 64), (64, 256), (256, 64)):
        tile = backward_tile(head_dim, head_dim_v, MaskKind.CAUSAL)
        config = backward_config(tile, head_dim, head_dim_v)
        specs.append(_spec(config, DType.BFLOAT16, MaskKind.CAUSAL))
    return specs


def _param(spec: KernelSpec) -> Any:
    config, dtype = spec.config, NAMES[spec.signature.dtype]
    parts = (
        dtype,
        f"d{config.head_dim}-{config.head_dim_v}",
        f"{config.tile_m}x{config.tile_n}",
        spec.signature.mask_kind.value,
        *(("deterministic",) if config.deterministic else ()),
        *(config.gradients if len(config.gradients) < 3 else ()),
    )
    return pytest.param(
        spec, id="-".join(parts), marks=pytest.mark.xdist_group(f"{dtype}-{config.head_dim}")
    )


def _clean(spec: KernelSpec) -> KernelResources:
    """The kernel's resources, once it is shown to use no local memory."""
    (kernel,) = inspect_cubin(compile_kernel(spec).artifacts.CUBIN)
    assert kernel.stack_bytes == kernel.local_bytes == 0
    assert kernel.sass.count("LDL") == kernel.sass.count("STL") == 0
    assert kernel.registers * spec.config.threads <= arch_of(spec.target).registers_per_sm
    return kernel


@pytest.mark.parametrize("spec", [_param(spec) for spec in _specs()])
def test_configuration_compiles_clean(spec: KernelSpec) -> None:
    kernel, config = _clean(spec), spec.config
    assert kernel.name.startswith("hopperflash_bwd_sm90_")
    sass = kernel.sass
    wanted = ["HGMMA", "UTMALDG", "UBLKCP", "USETMAXREG"]
    wanted += ["UTMAREDG"] if config.needs("dq") else []
    wanted += ["UTMASTG"] if config.needs("dk") or config.needs("dv") else []
    for opcode in wanted:
        assert sass.count(opcode) > 0, f"no {opcode}"
    assert sass.count("HMMA") == 0
    # A GEMM is one group of instructions in flight: more fences mean that ptxas serialised it.
    gemms, loops = 2 + len(config.gradients), LOOPS[spec.signature.mask_kind]
    assert sass.count("WARPGROUP.ARRIVE") == loops * gemms
    assert sass.count("WARPGROUP.DEPBAR") <= loops * 4


@pytest.mark.parametrize("dtype", DType, ids=NAMES.get)
def test_kernels_around_it_compile_clean(dtype: DType) -> None:
    signature = Signature(dtype, MaskKind.FULL, softcap=False)
    for ref, config in (
        (PREPROCESS, PreprocessConfig()),
        (PREPROCESS, PreprocessConfig(zero_dq=False)),
        (POSTPROCESS, PostprocessConfig()),
    ):
        kernel = _clean(KernelSpec(ref, config, signature, "sm_90a"))
        assert kernel.sass.count("LDG") > 0
        # Rows move 16 bytes a lane.
        assert any(".128" in opcode for opcode in kernel.sass.opcodes if opcode.startswith("LDG"))


def test_a_tile_holds_every_head_dim() -> None:
    assert {tile.head_dim for tile in BACKWARD_TILES} == set(HEAD_DIMS)
