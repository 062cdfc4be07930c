"""The planned Ampere configurations compile without spills and without Hopper's instructions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

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
from hopperflash.problem import DType, MaskKind
from hopperflash.runtime.compile import compile_kernel
from tests.support.configurations import (
    DOCUMENTS,
    EVERYTHING,
    GROUP,
    VARIANTS,
    Variant,
    params,
    walking,
)
from tests.support.sass import hopper_only

pytestmark = pytest.mark.compile

BF16, FP16 = DType.BFLOAT16, DType.FLOAT16
# One part of each table: with each amount of shared memory, Ampere's and those without a backend.
ARCHS = ("sm_80", "sm_86")
NEWER = ("sm_100a", "sm_120a")
# More parts that take these tables, and Hopper, where these kernels can be asked for.
SAMPLED_ARCHS = ("sm_89", "sm_90a")
EQUAL = [(head_dim, head_dim) for head_dim in HEAD_DIMS]
UNEQUAL = [pair for pair in product(HEAD_DIMS, HEAD_DIMS) if pair not in EQUAL]


def _spec(
    arch: str, pair: tuple[int, int], dtype: DType, variant: Variant, direction: str
) -> KernelSpec:
    """`direction` is "forward", "folded", "backward", "deterministic", or gradients as "dk+dv"."""
    signature = variant.signature(dtype)
    if direction in ("forward", "folded"):
        forward = forward_config(forward_tile(*pair, variant.mask, arch_of(arch)), *pair)
        group = GROUP if direction == "folded" else 1
        return KernelSpec(SM80.forward, replace(forward, group=group), signature, arch)
    tile = backward_tile(*pair, variant.mask, arch_of(arch), variant.packed)
    backward = backward_config(tile, *pair)
    if direction == "deterministic":
        backward = replace(backward, deterministic=True)
    elif direction != "backward":
        backward = replace(backward, gradients=tuple(direction.split("+")))
    return KernelSpec(SM80.backward, backward, signature, arch)


def _sampled() -> Iterator[KernelSpec]:
    """A forward and a backward of each table, and those that have been nearest to a spill."""
    yield _spec("sm_80", (64, 64), FP16, DOCUMENTS, "folded")
    yield _spec("sm_80", (128, 128), FP16, DOCUMENTS, "backward")
    yield _spec("sm_80", (128, 128), BF16, Variant(MaskKind.CAUSAL), "deterministic")
    yield walking(_spec("sm_80", (64, 64), FP16, DOCUMENTS, "folded"))
    for arch, forward, backward in (
        ("sm_86", 192, 256),
        ("sm_100a", 128, 64),
        ("sm_120a", 256, 128),
    ):
        yield _spec(arch, (forward, forward), FP16, EVERYTHING, "folded")
        yield _spec(arch, (backward, backward), FP16, EVERYTHING, "backward")


def _covering() -> Iterator[KernelSpec]:
    """Every row of Ampere's tables at its own head dims, in each variant and direction and both
    dtypes if not in every combination of them: fp16, folded heads and an order of additions
    take the most registers. Then what else selects a row, once or twice each, and the widest V
    where the compiler needs the most.
    """
    for arch in ARCHS:
        table = table_of(arch_of(arch))
        for row in table.forward:
            pair = (row.head_dim, row.head_dim_v)
            yield from (_spec(arch, pair, FP16, variant, "folded") for variant in VARIANTS)
            yield from (_spec(arch, pair, BF16, variant, "forward") for variant in VARIANTS[:2])
        for row in table.backward:
            pair = (row.head_dim, row.head_dim_v)
            yield from (_spec(arch, pair, FP16, variant, "backward") for variant in VARIANTS)
            yield from (
                _spec(arch, pair, dtype, variant, "deterministic")
                for dtype, variant in product(DType, VARIANTS[:2])
            )
        for pair in UNEQUAL:
            yield _spec(arch, pair, FP16, EVERYTHING, "folded")
            yield _spec(arch, pair, FP16, DOCUMENTS, "backward")
    for pair in EQUAL:
        yield walking(_spec("sm_80", pair, FP16, DOCUMENTS, "folded"))
        yield walking(_spec("sm_80", pair, FP16, DOCUMENTS, "deterministic"))
    for arch, pair in product((*ARCHS, *NEWER, *SAMPLED_ARCHS), EQUAL):
        yield _spec(arch, pair, FP16, EVERYTHING, "folded")
        yield _spec(arch, pair, FP16, EVERYTHING, "backward")
    for row, variant in product(table_of(arch_of("sm_100a")).forward, VARIANTS):
        if row.head_dim_v == HEAD_DIMS[-1]:
            yield _spec("sm_100a", (row.head_dim, row.head_dim_v), FP16, variant, "folded")
    for pair, gradients in product(EQUAL, ("dq", "dk+dv", "dv")):
        yield _spec("sm_80", pair, FP16, Variant(MaskKind.FULL), gradients)


@pytest.mark.parametrize("spec", params(_sampled(), _covering()))
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
