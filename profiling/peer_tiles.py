"""The cost model on the peers' tiles, beside their published speeds.

    python -m profiling.peer_tiles

prints the table of `docs/performance.md`. Tiles, operand sources and swaps are from the public
sources of FlashAttention; speeds are long-sequence TFLOP/s on an H100, in 16 bits without a mask.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hopperflash.plan.config import BackwardConfig, ForwardConfig, POperand
from hopperflash.plan.cost import Gemm, TileStep, tile_step

FLOP_PER_CLOCK = 4096
SMS = 132


@dataclass(frozen=True)
class Published:
    """A peer's loop, and how fast its kernel was measured."""

    name: str
    step: TileStep
    tflops: float
    source: str

    @property
    def at_one_gigahertz(self) -> float:
        """Predicted TFLOP/s at 1 GHz."""
        units = self.step.units
        return FLOP_PER_CLOCK * SMS * 1e-3 * units.tensor / units.bound.clocks


def _forward(tile: tuple[int, int], head_dim: int, p_operand: POperand) -> TileStep:
    tile_m, tile_n = tile
    return tile_step(
        ForwardConfig(tile_m, tile_n, head_dim, head_dim, tile_m // 64, 0, 0, p_operand), 2
    )


def _backward(tile_m: int, tile_n: int, head_dim: int) -> TileStep:
    """Two warpgroups stacked along the keys; dQ goes to L2 from registers."""
    return tile_step(BackwardConfig(tile_m, tile_n, head_dim, head_dim, 2, 2, 2, 0, 0), 2)


def _dQ_by_TMA(step: TileStep) -> TileStep:
    """TMA adds dQ from shared memory, where it is stored and read."""
    sums = "dQ added from registers"
    shared = tuple((name, size * (2 if name == sums else 1)) for name, size in step.shared)
    return replace(step, shared=shared)


def _shuffled_statistics(step: TileStep, shuffles: int) -> TileStep:
    """Row statistics handed around by shuffles, one a warp and value, not read by every thread."""
    others = tuple(item for item in step.shared if item[0] != "LSE and delta read")
    passes = shuffles * 4 * step.warpgroups * 128
    return replace(step, shared=(*others, ("LSE and delta shuffled", passes)))


def _transposed_dQ(step: TileStep, tile_m: int, tile_n: int, head_dim: int) -> TileStep:
    """dQ^T = K^T dS^T, with the head dim as rows."""
    return replace(
        step, gemms=(*step.gemms[:-1], Gemm("dQ^T = K^T dS^T", head_dim, tile_m, tile_n))
    )


def _fa3_backward_256() -> TileStep:
    """Queries as rows of S and dP, their columns split."""
    m, n, d = 64, 80, 256
    ours = _backward(m, n, d)
    scores = (Gemm("S", m, n, d, shares=2), Gemm("dP", m, n, d, shares=2))
    gradients = (Gemm("dV^T", d, n, m), Gemm("dK^T", d, n, m), Gemm("dQ^T", d, m, n))
    kept = ("Q and dO from TMA", "dS stored", "dQ added from registers")
    shared = tuple(item for item in ours.shared if item[0] in kept)
    return replace(ours, gemms=(*scores, *gradients), shared=(*shared, ("P stored", m * n * 2)))


REGISTERS, SHARED = POperand.REGISTERS, POperand.SHARED
PUBLISHED = (
    Published("FA3 forward 64, 192x192", _forward((192, 192), 64, SHARED), 497, "paper, 16k"),
    Published("FA4 forward 96, 192x144", _forward((192, 144), 96, SHARED), 600, "its notes"),
    Published("FA3 forward 128, 128x176", _forward((128, 176), 128, REGISTERS), 648, "paper, 16k"),
    Published("FA4 forward 128, 128x128", _forward((128, 128), 128, REGISTERS), 636, "its notes"),
    Published("FA3 forward 256, 128x80", _forward((128, 80), 256, REGISTERS), 756, "paper, 16k"),
    Published(
        "FA3 backward 64, 128x128",
        _shuffled_statistics(_dQ_by_TMA(_backward(128, 128, 64)), 64), 474, "paper, 16k",
    ),
    Published(
        "FA3 backward 128, 80x128",
        _transposed_dQ(_dQ_by_TMA(_backward(80, 128, 128)), 80, 128, 128), 561, "paper, 16k",
    ),
    Published("FA3 backward 256, 64x80", _fa3_backward_256(), 480, "flash-attention #2888"),
)  # fmt: skip


def fitted_clock(published: Sequence[Published] = PUBLISHED) -> float:
    """The clock in GHz with the least sum of squared relative errors: what a GPU would have to run
    at if nothing but the bound cost time."""
    ratios = [item.at_one_gigahertz / item.tflops for item in published]
    return sum(ratios) / sum(ratio * ratio for ratio in ratios)


def relative_errors(published: Sequence[Published] = PUBLISHED) -> list[float]:
    """Predicted over published, less one, at the fitted clock."""
    clock = fitted_clock(published)
    return [item.at_one_gigahertz * clock / item.tflops - 1 for item in published]


def root_mean_square(errors: Sequence[float]) -> float:
    """Of relative errors."""
    return math.sqrt(sum(error * error for error in errors) / len(errors))


def table() -> list[str]:
    """The lines of the table in `docs/performance.md`."""
    clock, errors = fitted_clock(), relative_errors()
    lines = [
        "| loop | tensor | MUFU | shared | L2 | bound by | predicted | published | error |"
        " source |",
        "| --- " * 10 + "|",
    ]
    for item, error in zip(PUBLISHED, errors, strict=True):
        units = item.step.units
        lines.append(
            f"| {item.name} | {units.tensor:.0f} | {units.mufu:.0f} | {units.shared:.0f}"
            f" | {units.l2:.0f} | {units.bound.unit} | {item.at_one_gigahertz * clock:.0f}"
            f" | {item.tflops:.0f} | {100 * error:+.1f} % | {item.source} |"
        )
    lines.append("")
    lines.append(
        f"One fitted clock, {clock:.2f} GHz: root mean square"
        f" {100 * root_mean_square(errors):.1f} %, worst {100 * max(map(abs, errors)):.1f} %."
    )
    return lines


if __name__ == "__main__":
    print("\n".join(table()))
