"""Our kernels and flash-attn-4's beside each other, as one compiler makes them; no GPU is needed.

    python -m profiling.compare_sass [--cubins DIR] [--docs DIR] [--head-dims 64,128]

Writes `sass.md` (table, thresholds) and `sass.svg` (ratios). With --cubins the peer's kernels are
kept in that folder and read from there the next time; ours are in the compile cache.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from hopperflash.analysis import KernelResources, inspect_cubin
from hopperflash.analysis.loop_cost import StepCost, Tile, shared_steps, step_cost
from hopperflash.cli.explain import ExplainOptions, plan_of
from hopperflash.plan import KernelSpec, LaunchPlan
from hopperflash.plan.block_range import (
    BlockTotals,
    Tiling,
    key_block_totals,
    query_block_totals,
)
from hopperflash.plan.config import BackwardConfig, ForwardConfig, POperand
from hopperflash.plan.cost import Moved, moved_bytes
from hopperflash.plan.sm90 import SM90
from hopperflash.plan.units import HOPPER
from hopperflash.problem import DType, MaskKind, MaskSpec, Signature
from profiling.peer import KERNELS, PeerKernel, compile_peer

HEAD_DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))
# Where blocks are counted: one head of this many queries and keys.
SEQLEN = 8192
WINDOW_LEFT = 1024
MASKS = {
    MaskKind.FULL: MaskSpec(),
    MaskKind.CAUSAL: MaskSpec(right=0),
    MaskKind.WINDOW: MaskSpec(left=WINDOW_LEFT, right=0),
}
ITEMSIZE = 2


@dataclass(frozen=True)
class Case:
    """One kernel of each side."""

    direction: str
    head_dim: int
    head_dim_v: int
    mask: MaskKind

    @property
    def name(self) -> str:
        return f"{name_of(self.head_dim, self.head_dim_v)} {self.mask.value}"


def name_of(head_dim: int, head_dim_v: int) -> str:
    """`64`, or `192/128`."""
    return f"{head_dim}" if head_dim == head_dim_v else f"{head_dim}/{head_dim_v}"


def head_dims_of(text: str) -> tuple[tuple[int, int], ...]:
    """Those of `HEAD_DIMS` that a list names: `64,192/128`. ArgumentTypeError for others."""
    known = {name_of(*dims): dims for dims in HEAD_DIMS}
    unknown = [name for name in text.split(",") if name not in known]
    if unknown:
        names = ", ".join(unknown)
        raise argparse.ArgumentTypeError(f"no head dims {names}: there are {', '.join(known)}")
    return tuple(known[name] for name in text.split(","))


ALL_HEAD_DIMS = ",".join(name_of(*dims) for dims in HEAD_DIMS)


@dataclass(frozen=True)
class Side:
    """A kernel as compiled. Where all steps are alike, interior and boundary are the same."""

    tile_m: int
    tile_n: int
    steps: tuple[StepCost, ...]
    spill_bytes: int
    stack_bytes: int
    clocks: float
    """Of the bounds of all steps at SEQLEN, over the visible pairs, times 1000."""

    @property
    def interior(self) -> StepCost:
        """The step without a mask, or the cheapest there is."""
        return min(self.steps, key=lambda step: (step.masked, step.instructions))

    @property
    def boundary(self) -> StepCost:
        """The dearest step with a mask, or the dearest there is."""
        return max(self.steps, key=lambda step: (step.masked, step.instructions))

    @property
    def masks_always(self) -> bool:
        """Whether interior steps are masked too."""
        return self.interior.masked

    @property
    def l2_rate(self) -> float:
        """Bytes a clock asked of L2 in the interior."""
        return self.interior.units.l2_demand * HOPPER.l2_bytes


@dataclass(frozen=True)
class Pair:
    """A case with both sides."""

    case: Case
    ours: Side
    peer: Side

    @property
    def interior(self) -> float:
        """Ratio of instructions for a score of an interior step, ours over the peer's: of those
        that every step executes."""
        return self.ours.interior.always_per_score / self.peer.interior.always_per_score

    @property
    def boundary(self) -> float | None:
        """The same of a boundary step, None where one side has no loop of them. Ours of a backward
        without a band masks packed values, which no select tells."""
        if len(self.ours.steps) == 1 or not self.peer.boundary.masked:
            return None
        return self.ours.boundary.always_per_score / self.peer.boundary.always_per_score

    @property
    def bound(self) -> float:
        """Ratio of the modelled bounds for a visible pair."""
        return self.ours.clocks / self.peer.clocks


def cases(head_dims: tuple[tuple[int, int], ...] = HEAD_DIMS) -> list[Case]:
    """All cases, forward first."""
    return [
        Case(direction, *dims, mask) for direction, dims, mask in product(KERNELS, head_dims, MASKS)
    ]


def our_side(case: Case) -> Side:
    """What the plan has for a case, compiled."""
    from hopperflash.runtime.compile import compile_kernel

    ref, config = getattr(SM90, case.direction), planned_config(case)
    spec = KernelSpec(ref, config, Signature(DType.BFLOAT16, case.mask), "sm_90a")
    cubin = compile_kernel(spec).artifacts.CUBIN
    (kernel,) = inspect_cubin(cubin)
    return side(case, config, kernel, moved_bytes(config, ITEMSIZE))


def planned_config(case: Case) -> ForwardConfig | BackwardConfig:
    """The configuration of the main kernel for one head of SEQLEN queries and keys."""
    configs = (call.spec.config for call in plan_of_head(case).calls)
    return next(c for c in configs if isinstance(c, (ForwardConfig, BackwardConfig)))


def plan_of_head(case: Case) -> LaunchPlan:
    """The plan for one head of SEQLEN queries and keys."""
    options = ExplainOptions(
        seqlen=SEQLEN,
        heads=1,
        kv_heads=1,
        head_dim=case.head_dim,
        head_dim_v=case.head_dim_v,
        causal=case.mask is MaskKind.CAUSAL,
        window=f"{WINDOW_LEFT},0" if case.mask is MaskKind.WINDOW else None,
        direction=case.direction,
    )
    return plan_of(options)


def peer_side(case: Case, kernel: PeerKernel) -> Side:
    """The peer's kernel with its tile as a configuration of ours, which the bytes follow from."""
    common = {
        "tile_m": kernel.tile_m,
        "tile_n": kernel.tile_n,
        "head_dim": kernel.head_dim,
        "head_dim_v": kernel.head_dim_v,
        "consumer_warpgroups": kernel.warpgroups,
        "registers_producer": 0,
        "registers_consumer": 0,
    }
    config: ForwardConfig | BackwardConfig
    if case.direction == "forward":
        config = ForwardConfig(**common, p_operand=POperand.REGISTERS)
    else:
        split = {"key_warpgroups": kernel.warpgroups, "dq_warpgroups": kernel.dq_warpgroups}
        config = BackwardConfig(**common, **split)
    (resources,) = inspect_cubin(kernel.cubin)
    moved = moved_bytes(config, ITEMSIZE)
    if case.direction == "backward":
        # TMA adds dQ from shared memory.
        moved = moved._replace(out_of_shared=kernel.tile_m * kernel.head_dim * 4)
    return side(case, config, resources, moved)


def side(
    case: Case, config: ForwardConfig | BackwardConfig, kernel: KernelResources, moved: Moved
) -> Side:
    """`moved`: what no thread moves in a step."""
    tile = Tile(
        scores=config.tile_m * config.tile_n,
        moved=moved,
        rates=HOPPER,
    )
    steps = tuple(step_cost(shares, tile) for shares in shared_steps(config, kernel.sass))
    found = Side(
        config.tile_m, config.tile_n, steps, kernel.local_bytes, kernel.stack_bytes, clocks=0.0
    )
    return replace(found, clocks=clocks_per_thousand(case, found))


def clocks_per_thousand(case: Case, found: Side) -> float:
    """The bounds of all steps of one head, over its visible pairs, times 1000."""
    mask = MASKS[case.mask]
    totals = blocks_of_head(case, found.tile_m, found.tile_n)
    clocks = totals.unmasked * found.interior.units.bound.clocks
    clocks += totals.masked * found.boundary.units.bound.clocks
    return 1000 * clocks / visible_pairs(mask)


def blocks_of_head(case: Case, tile_m: int, tile_n: int) -> BlockTotals:
    """The steps of one head of SEQLEN queries and keys."""
    count = key_block_totals if case.direction == "forward" else query_block_totals
    return count(MASKS[case.mask], Tiling(SEQLEN, SEQLEN, tile_m, tile_n))


def visible_pairs(mask: MaskSpec) -> int:
    """Visible pairs of one head of SEQLEN queries and keys."""
    left = SEQLEN if mask.left is None else mask.left
    right = SEQLEN if mask.right is None else mask.right
    return sum(min(query + right, SEQLEN - 1) - max(query - left, 0) + 1 for query in range(SEQLEN))


def compare(chosen: list[Case], folder: Path | None) -> Iterator[Pair]:
    """Every case compiled on both sides."""
    peers: dict[tuple[int, int, MaskKind], dict[str, PeerKernel]] = {}
    for case in chosen:
        key = (case.head_dim, case.head_dim_v, case.mask)
        if key not in peers:
            peers[key] = _peer_kernels(*key, folder)
        pair = Pair(case, our_side(case), peer_side(case, peers[key][case.direction]))
        print(f"{case.direction} {case.name}: {pair.interior:.2f}, {pair.bound:.2f}", flush=True)
        yield pair


def _peer_kernels(
    head_dim: int, head_dim_v: int, mask: MaskKind, folder: Path | None
) -> dict[str, PeerKernel]:
    if folder is None:
        return compile_peer(head_dim, head_dim_v, mask.value)
    name = f"flash-attn-4-{head_dim}-{head_dim_v}-{mask.value}"
    if not all((folder / f"{name}-{direction}.cubin").exists() for direction in KERNELS):
        for direction, kernel in compile_peer(head_dim, head_dim_v, mask.value).items():
            kernel.save(folder, f"{name}-{direction}")
    return {direction: PeerKernel.load(folder, f"{name}-{direction}") for direction in KERNELS}


def main() -> None:
    from profiling.compare_report import write

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cubins", type=Path)
    parser.add_argument("--docs", type=Path, default=Path("docs/performance"))
    parser.add_argument("--head-dims", type=head_dims_of, default=ALL_HEAD_DIMS)
    arguments = parser.parse_args()
    pairs = list(compare(cases(arguments.head_dims), arguments.cubins))
    for path in write(pairs, arguments.docs):
        print(path)


if __name__ == "__main__":
    main()
