"""What every attention kernel is made of before it is traced: configuration, variant, name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Generic, TypeVar

from cutlass import Int32

from hopperflash.plan.config import MainConfig, cluster_of
from hopperflash.problem.problem import Signature

from . import operands
from .band import Band
from .dtypes import NUMERIC
from .work import Tiles, Walk

ConfigT = TypeVar("ConfigT", bound=MainConfig)


class AttentionKernel(Generic[ConfigT]):
    """Base of the forward and backward classes of each architecture."""

    kind: ClassVar[str]  # as in the name: "fwd_sm90"
    fake_operands: ClassVar[Callable[[Signature], tuple[Any, ...]]]

    def __init__(self, config: ConfigT, signature: Signature, dependent: bool = False):
        self.config = config
        self.dependent = dependent
        self.signature = signature
        self.dtype = NUMERIC[signature.dtype]
        self.capped = signature.softcap
        self.packed = signature.packed
        self.name = "_".join(self._name_parts())

    def fake_arguments(self) -> tuple[Any, ...]:
        """Stand-ins for the arguments of `__call__`: any lengths, rows that can be read 16 bytes at
        a time."""
        return (*type(self).fake_operands(self.signature), *operands.scalars())

    def _name_parts(self) -> list[str]:
        config, signature = self.config, self.signature
        flags = {"softcap": self.capped, "packed": self.packed}
        return [
            f"hopperflash_{self.kind}_{signature.dtype.value}",
            f"d{config.head_dim}x{config.head_dim_v}",
            f"{config.tile_m}x{config.tile_n}",
            signature.mask_kind.value,
            *(flag for flag, on in flags.items() if on),
            *config.variant,
        ]

    def band(self, window_left: Int32, window_right: Int32, group: int = 1) -> Band:
        """The mask, whose kind is part of the compiled code, of tiles of `group` heads."""
        return Band(self.signature.mask_kind, window_left, window_right, group)

    def walk(self, tiles: Tiles, descending: bool, swizzled: bool) -> Walk:
        """The way of this CTA through the tiles."""
        config = self.config
        return Walk(config.scheduler, descending, swizzled, cluster_of(config), tiles)
