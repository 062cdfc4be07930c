"""Every planned forward configuration compiles for sm_90a into what the plan says it is."""

from __future__ import annotations

from itertools import product

import pytest

from hopperflash.analysis import inspect_cubin
from hopperflash.plan import KernelSpec, arch_of
from hopperflash.plan.sm90 import SM90
from hopperflash.plan.tiles_sm90 import FORWARD_TILES, forward_config
from hopperflash.problem import DType, Signature
from hopperflash.runtime.compile import compile_kernel
from tests.support.sass import HOPPER_ONLY, hopper_only

pytestmark = pytest.mark.compile

SPECS = [
    KernelSpec(
        SM90.forward,
        forward_config(tile, tile.head_dim, tile.head_dim_v),
        Signature(dtype, mask, False),
        "sm_90a",
    )
    for tile, dtype in product(FORWARD_TILES, DType)
    for mask in tile.masks
]


def _param(spec: KernelSpec) -> object:
    config, signature = spec.config, spec.signature
    dtype = {"bfloat16": "bf16", "float16": "fp16"}[signature.dtype.value]
    return pytest.param(
        spec,
        id=f"{dtype}-d{config.head_dim}-{config.head_dim_v}-{config.tile_m}x{config.tile_n}-{signature.mask_kind.value}",
        marks=pytest.mark.xdist_group(f"{dtype}-{config.head_dim}"),
    )


@pytest.mark.parametrize("spec", [_param(spec) for spec in SPECS])
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
    # What the Ampere tests look for is found here; clusters and bulk copies are not used.
    assert hopper_only(sass) == {*HOPPER_ONLY} - {"UBLK", "UCGABAR"}
