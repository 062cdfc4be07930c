"""The planned Ampere configurations compile without spills and without Hopper's instructions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle, product
from typing import Any, NamedTuple

import pytest

from hopperflash.analysis import inspect_cubin
from hopperflash.plan import KernelSpec, arch_of
from hopperflash.plan.sm80 import SM80
from hopperflash.plan.tiles import HEAD_DIMS
from hopperflash.plan.tiles_sm80 import (
    backward_config,
    backward_tile,
    forward_config,
    forward_tile,
    table_of,
)
from hopperflash.problem import DType, MaskKind, Signature
from hopperflash.runtime.compile import compile_kernel
from tests.support.sass import hopper_only

pytestmark = pytest.mark.compile

NAMES = {DType.BFLOAT16: "bf16", DType.FLOAT16: "fp16"}
ARCHS = ("sm_80", "sm_86", "sm_89")
# One part with each amount of shared memory for what has no backend of its own, and Hopper, where
# these kernels can be asked for.
NEWER = ("sm_90a", "sm_100a", "sm_120a")


class Variant(NamedTuple):
    """What a signature holds beside the dtype."""

    mask: MaskKind
    softcap: bool = False
    packed: bool = False


# Windows first: their kernels have one loop more, and the first rows of the tables the most
# registers in use.
VARIANTS = tuple(
    Variant(*fields) for fields in product(reversed(MaskKind), (False, True), (False, True))
)


def _spec(
    arch: str, pair: tuple[int, int], dtype: DType, variant: Variant, direction: str
) -> KernelSpec:
    signature = Signature(dtype, variant.mask, variant.softcap, variant.packed)
    if direction == "forward":
        forward = forward_config(forward_tile(*pair, variant.mask, arch_of(arch)), *pair)
        return KernelSpec(SM80.forward, forward, signature, arch)
    backward = backward_config(backward_tile(*pair, variant.mask, arch_of(arch)), *pair)
    if direction == "deterministic":
        backward = replace(backward, deterministic=True)
    elif direction != "backward":
        backward = replace(backward, gradients=tuple(direction.split("+")))
    return KernelSpec(SM80.backward, backward, signature, arch)


def _sampled() -> list[KernelSpec]:
    """Every row of both tables twice, at its own head dims: as training mostly asks for it, and in
    one of the other variants, all of which a direction meets."""
    specs = []
    for direction in ("forward", "backward"):
        variants = cycle(VARIANTS)
        for arch in ("sm_80", "sm_86"):
            for row in getattr(table_of(arch_of(arch)), direction):
                for variant in (Variant(MaskKind.CAUSAL), next(variants)):
                    pair = (row.head_dim, row.head_dim_v)
                    specs.append(_spec(arch, pair, DType.BFLOAT16, variant, direction))
    return specs


def _all() -> Iterator[KernelSpec]:
    """Every pair of head dims with every dtype, variant and order; fewer gradients once a head
    dim."""
    directions = ("forward", "backward", "deterministic")
    equal = [(head_dim, head_dim) for head_dim in HEAD_DIMS]
    parts = [*product(ARCHS, product(HEAD_DIMS, HEAD_DIMS)), *product(NEWER, equal)]
    for arch, pair in parts:
        for dtype, variant, direction in product(DType, VARIANTS, directions):
            yield _spec(arch, pair, dtype, variant, direction)
    for arch, head_dim, gradients in product(ARCHS, HEAD_DIMS, ("dq", "dk+dv", "dv")):
        full = Variant(MaskKind.FULL)
        yield _spec(arch, (head_dim, head_dim), DType.FLOAT16, full, gradients)


def _params() -> list[Any]:
    sampled = _sampled()
    return [
        pytest.param(
            spec,
            id=_id(spec),
            marks=[_group(spec), *([] if spec in sampled else [pytest.mark.slow])],
        )
        for spec in dict.fromkeys([*sampled, *_all()])
    ]


def _group(spec: KernelSpec) -> Any:
    return pytest.mark.xdist_group(f"{spec.target}-{spec.config.head_dim}")


def _id(spec: KernelSpec) -> str:
    config = spec.config
    order = ("deterministic",) if getattr(config, "deterministic", False) else ()
    gradients = getattr(config, "gradients", ("dq", "dk", "dv"))
    return "-".join(
        (
            spec.target,
            "fwd" if spec.ref == SM80.forward else "bwd",
            NAMES[spec.signature.dtype],
            f"d{config.head_dim}-{config.head_dim_v}",
            f"{config.tile_m}x{config.tile_n}",
            spec.signature.mask_kind.value,
            *(("softcap",) if spec.signature.softcap else ()),
            *(("packed",) if spec.signature.packed else ()),
            *order,
            *(gradients if len(gradients) < 3 else ()),
        )
    )


@pytest.mark.parametrize("spec", _params())
def test_configuration_compiles_clean(spec: KernelSpec) -> None:
    (kernel,) = inspect_cubin(compile_kernel(spec).artifacts.CUBIN)
    sass = kernel.sass
    assert kernel.stack_bytes == kernel.local_bytes == 0
    assert sass.count("LDL") == sass.count("STL") == 0
    assert kernel.registers * spec.config.threads <= arch_of(spec.target).registers_per_sm
    for opcode in ("HMMA", "LDSM", "LDGSTS"):
        assert sass.count(opcode) > 0, f"no {opcode}"
    assert hopper_only(sass) == set()
    if spec.ref == SM80.backward and spec.config.needs("dq"):
        assert sass.count("RED") + sass.count("REDG") > 0, "dQ is added up by reductions"
