"""What compile tests go through: variants of code, names, and which of them run by default."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from hopperflash.plan import KernelSpec
from hopperflash.plan.config import MainConfig, Scheduler, cluster_of
from hopperflash.plan.scheduling import walking as several_tiles
from hopperflash.problem import DType, MaskKind, Signature

NAMES = {DType.BFLOAT16: "bf16", DType.FLOAT16: "fp16"}
GROUP = 3  # query heads folded into a forward tile, with idle rows where the tile is 128


class Variant(NamedTuple):
    """What a signature holds beside the dtype."""

    mask: MaskKind
    softcap: bool = False
    packed: bool = False

    def signature(self, dtype: DType) -> Signature:
        return Signature(dtype, self.mask, self.softcap, self.packed)


# With a window the kernels have one loop more; packed they keep the sequence's place.
EVERYTHING = Variant(MaskKind.WINDOW, softcap=True, packed=True)
DOCUMENTS = Variant(MaskKind.CAUSAL, packed=True)
VARIANTS = (EVERYTHING, DOCUMENTS, Variant(MaskKind.WINDOW, packed=True), Variant(MaskKind.FULL))


def walking(spec: KernelSpec, scheduler: Scheduler = Scheduler.PERSISTENT) -> KernelSpec:
    """The same with CTAs that walk over several tiles."""
    assert isinstance(spec.config, MainConfig)
    return replace(spec, config=several_tiles(spec.config, scheduler))


def params(sampled: Iterable[KernelSpec], covering: Iterable[KernelSpec]) -> list[Any]:
    """Parameters for both, each once; those of `covering` alone are slow."""
    default = dict.fromkeys(sampled)
    return [
        pytest.param(spec, id=_id(spec), marks=[] if spec in default else [pytest.mark.slow])
        for spec in dict.fromkeys([*default, *covering])
    ]


def _id(spec: KernelSpec) -> str:
    config, signature = spec.config, spec.signature
    gradients = getattr(config, "gradients", ("dq", "dk", "dv"))
    parts = (
        spec.target,
        "bwd" if hasattr(config, "gradients") else "fwd",
        NAMES[signature.dtype],
        f"d{config.head_dim}-{config.head_dim_v}",
        f"{config.tile_m}x{config.tile_n}",
        signature.mask_kind.value,
        "softcap" if signature.softcap else "",
        "packed" if signature.packed else "",
        "deterministic" if getattr(config, "deterministic", False) else "",
        "" if config.scheduler is Scheduler.SINGLE else config.scheduler.value,
        "folded" if getattr(config, "group", 1) > 1 else "",
        "paired" if isinstance(config, MainConfig) and cluster_of(config) > 1 else "",
        *(gradients if len(gradients) < 3 else ()),
    )
    return "-".join(filter(None, parts))
