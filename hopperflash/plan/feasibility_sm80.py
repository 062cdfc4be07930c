"""Does an Ampere configuration fit? Each refusal carries the arithmetic that rules it out."""

from __future__ import annotations

from collections.abc import Iterator

from hopperflash.plan.arch import ArchSpec
from hopperflash.plan.budget_sm80 import ConfigSm80, registers, shared_memory
from hopperflash.plan.config import MMA_ROWS, BackwardConfigSm80, ForwardConfigSm80
from hopperflash.plan.feasibility import register_reasons, shared_memory_reasons
from hopperflash.plan.support import Support
from hopperflash.problem import DType

# The K extent of mma.sync m16n8k16, and the columns that one ldmatrix fills two B operands with.
MMA_STEP = 16
# The columns of one mma.sync, where a warp has no more of S^T.
MMA_COLUMNS = 8
# Elements of a row that lie together in shared memory: the widest swizzle that divides it.
SWIZZLE_WIDTHS = (64, 32, 16)
VECTOR_ELEMENTS = 8
VECTOR_FLOATS = 4
MIN_STAGES = 2


def check(config: ConfigSm80, arch: ArchSpec, dtype: DType) -> Support:
    """Whether `arch` can run `config`."""
    if isinstance(config, ForwardConfigSm80):
        reasons = [*_forward_shape_reasons(config)]
    else:
        reasons = [*_backward_shape_reasons(config)]
    if not reasons:
        reasons += shared_memory_reasons(shared_memory(config, dtype.itemsize), arch)
        reasons += register_reasons(registers(config, arch), "thread")
    return Support.unless(reasons)


def _forward_shape_reasons(config: ForwardConfigSm80) -> Iterator[str]:
    """Rows of S and O belong to warps; columns go by the step of a k-step."""
    c = config
    yield from _split("tile_m", c.tile_m, c.warps, "along the queries")
    for name in ("tile_n", "head_dim", "head_dim_v"):
        yield from _split(name, getattr(c, name), 1)
    yield from _stage_reasons(c.stages_kv)
    yield from _copy_reasons(c, "head_dim", "tile_m", "tile_n")
    yield from _copy_reasons(c, "head_dim_v", "tile_m", "tile_n")


def _backward_shape_reasons(config: BackwardConfigSm80) -> Iterator[str]:
    """Rules of S^T, dP^T, dV and dK (tile_n rows) and of dQ (tile_m rows)."""
    c = config
    if c.warps % c.key_warps:
        yield f"{c.warps} warps do not divide by the {c.key_warps} stacked along the keys"
        return
    yield from _split("tile_n", c.tile_n, c.key_warps, "along the keys")
    if c.tile_m != MMA_COLUMNS * c.key_shares:
        yield from _split("tile_m", c.tile_m, c.key_shares)
    for name in ("head_dim", "head_dim_v"):
        yield from _split(name, getattr(c, name), c.key_shares)
    if not c.query_warps or c.warps % c.query_warps or c.tile_m % (MMA_ROWS * c.query_warps):
        yield f"tile_m {c.tile_m}: {c.warps} warps cannot share {MMA_ROWS}s of its rows (dQ)"
    else:
        yield from _split("head_dim", c.head_dim, c.warps // c.query_warps, "in dQ")
    if c.tile_m > c.threads * VECTOR_FLOATS:
        yield f"tile_m {c.tile_m} exceeds {c.threads} threads * {VECTOR_FLOATS} row statistics"
    yield from _stage_reasons(c.stages)
    yield from _copy_reasons(c, "head_dim", "tile_n", "tile_m")
    yield from _copy_reasons(c, "head_dim_v", "tile_n", "tile_m")


def _split(name: str, size: int, warps: int, where: str = "") -> Iterator[str]:
    """A size that `warps` share in steps of `MMA_STEP`."""
    step = MMA_STEP * warps
    if size > 0 and size % step == 0:
        return
    shared = f": {warps} warps {where}".rstrip() if warps > 1 else ""
    yield f"{name} {size} is not a multiple of {step}{shared} (mma.sync, ldmatrix)"


def _stage_reasons(stages: int) -> Iterator[str]:
    if stages < MIN_STAGES:
        yield f"{stages} stages: one is read while the next is loaded, so {MIN_STAGES} at least"


def _copy_reasons(config: ConfigSm80, columns: str, *tiles: str) -> Iterator[str]:
    """A pass of all threads over a tile, 16 bytes each, covers whole rows of one swizzle width."""
    width = next((w for w in SWIZZLE_WIDTHS if getattr(config, columns) % w == 0), None)
    if width is None:
        return
    rows = config.threads * VECTOR_ELEMENTS // width
    for name in tiles:
        if getattr(config, name) % rows:
            yield (
                f"{name} {getattr(config, name)} is not a multiple of {rows}, the rows of {width}"
                f" elements ({columns} {getattr(config, columns)}) that {config.threads} threads"
                " copy at a time"
            )
