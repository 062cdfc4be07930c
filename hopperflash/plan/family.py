"""What the GPU backends have in common: limits, copies, launches and buffers.

Their kernels take the same operands in the same order, over the same grids, so one backend differs
from another only in what `KernelFamily` holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from hopperflash.plan.arch import ArchSpec
from hopperflash.plan.config import (
    AccumulatorOrder,
    BackwardConfig,
    BackwardConfigSm80,
    ForwardConfig,
    ForwardConfigSm80,
    PostprocessConfig,
    PreprocessConfig,
    Scheduler,
    TileTableConfig,
)
from hopperflash.plan.launch_plan import (
    NOTHING,
    Buffer,
    Copy,
    KernelCall,
    KernelRef,
    KernelSpec,
    Steps,
)
from hopperflash.plan.limits import limit_reasons
from hopperflash.plan.scheduling import (
    head_swizzle,
    margin_reasons,
    max_ctas,
    placed,
    scheduled,
)
from hopperflash.plan.support import Support
from hopperflash.plan.tile_tables import TileTables
from hopperflash.problem import (
    GRADIENTS,
    AttnProblem,
    Direction,
    DType,
    MaskKind,
    OperandFacts,
    Signature,
)
from hopperflash.problem.lengths import LENGTHS
from hopperflash.problem.results import expected_facts

STATISTICS = ("lse", "dlse")
SCALARS = (
    "softmax_scale", "softcap", "window_left", "window_right", "max_ctas", "head_swizzle",
)  # fmt: skip
FORWARD_OPERANDS = ("q", "k", "v", "out", "lse")
TAKEN = "tiles_taken"

PREPROCESS = KernelRef("hopperflash.kernels.auxiliary.bwd_preprocess", "BackwardPreprocess")
PREPROCESS_OPERANDS = ("out", "dout", "lse", "dlse", "lse_log2", "delta", "dq_acc")
BACKWARD_INPUTS = ("q", "k", "v", "dout", "lse_log2", "delta", "dq_acc", "dq_turn")
POSTPROCESS = KernelRef("hopperflash.kernels.auxiliary.bwd_postprocess", "BackwardPostprocess")
POSTPROCESS_OPERANDS = ("dq_acc", "dq")

VECTOR_BYTES = 16
UNBOUNDED = 2**30 - 1  # farther than any two rows of a problem with a window may be apart


ForwardT = TypeVar("ForwardT", ForwardConfig, ForwardConfigSm80)
BackwardT = TypeVar("BackwardT", BackwardConfig, BackwardConfigSm80)


@dataclass(frozen=True)
class KernelFamily(Generic[ForwardT, BackwardT]):
    """The kernels of a backend.

    `feature` is what they need of an arch and `reader` what they read operands with, as reasons
    name them. A configuration comes with where its tile is from.
    """

    feature: str
    reader: str
    forward: KernelRef
    backward: KernelRef
    forward_config: Callable[[AttnProblem, ArchSpec], tuple[ForwardT, str]]
    backward_config: Callable[[AttnProblem, ArchSpec], tuple[BackwardT, str]]
    check: Callable[[ForwardT | BackwardT, ArchSpec, DType], Support]
    takes_tiles: bool = False
    """Whether the forward has a dynamic scheduler."""

    def supports(self, problem: AttnProblem, arch: ArchSpec, direction: Direction) -> Support:
        """Whether the kernels compute `problem` on `arch`."""
        reasons = []
        if self.feature not in arch.features:
            reasons.append(f"arch {arch.name} has no {self.feature.replace('_', '.')}")
        reasons += limit_reasons(problem, direction) + margin_reasons(problem, arch)
        if not reasons:
            reasons += self._tile_reasons(problem, arch, direction)
        return Support.unless(reasons)

    def steps(self, problem: AttnProblem, arch: ArchSpec, direction: Direction) -> Steps:
        """The launches of one direction."""
        if direction == "forward":
            return self._forward_steps(problem, arch)
        if not problem.gradients:
            return Steps(reasons=("no gradient is asked for: nothing is launched",))
        return self._backward_steps(problem, arch)

    def _copies(
        self, problem: AttnProblem, results: Iterable[Buffer]
    ) -> tuple[tuple[Copy, ...], tuple[Copy, ...]]:
        """Operands that cannot be read in place, and results that cannot be written in place."""
        written = {buffer.name for buffer in results}
        found = [
            Copy(name, reason)
            for name, facts in problem.operands
            if name not in LENGTHS
            and (
                reason := statistic_refusal(facts)
                if name in STATISTICS
                else read_refusal(facts, problem.dtype.itemsize, self.reader)
            )
        ]
        return (
            tuple(copy for copy in found if copy.operand not in written),
            tuple(copy for copy in found if copy.operand in written),
        )

    def _forward_steps(self, problem: AttnProblem, arch: ArchSpec) -> Steps:
        """One launch over the tiles of queries, query heads and batch entries."""
        p: AttnProblem = problem
        tile, source = self.forward_config(p, arch)
        listed = TileTableConfig(tile_m=tile.queries, descending_q=p.is_causal)
        tables: TileTables = TileTables.of(p, listed)
        blocks, heads = _ceil_div(p.seqlen_q, tile.queries), p.heads_q // tile.group
        grid = tables.grid("q", heads, blocks)
        config: ForwardT = scheduled(tile, p, arch, math.prod(grid))
        swizzle = head_swizzle(config, p, arch)
        spec = KernelSpec(self.forward, config, p.signature, arch.name)
        dynamic = config.scheduler is Scheduler.DYNAMIC
        taken: tuple[str, ...] = (TAKEN if dynamic else NOTHING,) if self.takes_tiles else ()
        operands = (*FORWARD_OPERANDS, tables.operand("q"), *taken, *SCALARS)
        results = _results(p, ("out", "lse"))
        copies, copies_back = self._copies(p, results)
        main = placed(KernelCall(spec, operands, grid), p, arch, swizzle)
        return Steps(
            calls=_in_a_row(tables.before(arch, [main]), arch),
            copies=copies,
            copies_back=copies_back,
            scalars=_scalars(p, max_ctas(config, p, arch), swizzle),
            workspaces=tables.buffers(*[Buffer(TAKEN, (1,), "int32", zeroed=True)] * dynamic),
            results=results,
            reasons=(f"tile {config.tile_m}x{config.tile_n}: {source}",),
        )

    def _backward_steps(self, problem: AttnProblem, arch: ArchSpec) -> Steps:
        """Statistics of the rows, the gradients, and dQ in the input dtype."""
        p: AttnProblem = problem
        tile, source = self.backward_config(p, arch)
        # Only dQ is added up by several CTAs, so only dQ needs an order.
        blocks = _ceil_div(p.seqlen_k, tile.tile_n)
        config: BackwardT = replace(
            scheduled(tile, p, arch, blocks * p.heads_k * p.batch),
            deterministic=p.deterministic and "dq" in p.gradients,
            gradients=p.gradients,
        )
        # Turns follow the launch: causal, late keys first, since few queries see them.
        late_first = config.deterministic and p.is_causal
        listed = TileTableConfig(config.tile_m, config.tile_n, descending_k=late_first)
        tables: TileTables = TileTables.of(p, listed)
        swizzle = head_swizzle(config, p, arch)
        query_blocks = _ceil_div(p.seqlen_q, config.tile_m)
        if p.sequences is not None:
            query_blocks = p.seqlen_q // config.tile_m + p.sequences
        statistic = (p.batch, p.heads_q, query_blocks * config.tile_m)
        # What no kernel touches still needs an argument: the smallest that its descriptor allows.
        accumulator: tuple[int, ...] = (1, 1, 1, 8)
        if "dq" in p.gradients:
            accumulator = _accumulator_shape(p, config, query_blocks)
        turns = (p.batch, p.heads_q, query_blocks) if config.deterministic else (1, 1, 1)
        narrowed = p.gradients != GRADIENTS
        asked: tuple[str, ...] = (f"only {', '.join(p.gradients)} asked for",) if narrowed else ()
        results = _results(p, p.gradients)
        copies, copies_back = self._copies(p, results)
        calls = tables.before(
            arch, _backward_calls(p, self.backward, config, arch, tables, swizzle)
        )
        return Steps(
            calls=_in_a_row(calls, arch),
            copies=copies,
            copies_back=copies_back,
            scalars=_scalars(p, max_ctas(config, p, arch), swizzle),
            workspaces=tables.buffers(
                Buffer("lse_log2", statistic, "float32"),
                Buffer("delta", statistic, "float32"),
                Buffer("dq_acc", accumulator, "float32"),
                Buffer("dq_turn", turns, "int32", zeroed=config.deterministic),
            ),
            results=results,
            reasons=(f"tile {config.tile_m}x{config.tile_n}: {source}", *asked),
        )

    def _tile_reasons(
        self, problem: AttnProblem, arch: ArchSpec, direction: Direction
    ) -> list[str]:
        """The arithmetic that rules the table's tile out, so that a bad edit is not launched."""
        config: ForwardT | BackwardT
        if direction == "forward":
            config, _ = self.forward_config(problem, arch)
        else:
            config, _ = self.backward_config(problem, arch)
        name = (
            f"tile {config.tile_m}x{config.tile_n} at head_dim {config.head_dim},"
            f" head_dim_v {config.head_dim_v}"
        )
        return [f"{name}: {reason}" for reason in self.check(config, arch, problem.dtype).reasons]


def read_refusal(facts: OperandFacts, itemsize: int, reader: str) -> str | None:
    """Why `reader` cannot read an operand in place, or None where it can.

    TMA and cp.async move 16 bytes along a row, which takes an aligned base, a last stride of 1, and
    every other stride a positive multiple of 16 bytes. The stride of a dimension of length 1 is
    never used and may be anything.
    """
    if facts.alignment % VECTOR_BYTES:
        return f"base address aligned to {facts.alignment} bytes, {reader} wants {VECTOR_BYTES}"
    *outer, (last_length, last_stride) = zip(facts.shape, facts.strides, strict=True)
    if last_length > 1 and last_stride != 1:
        return f"last stride {last_stride}, {reader} wants 1"
    step = VECTOR_BYTES // itemsize
    bad = [stride for length, stride in outer if length > 1 and (stride <= 0 or stride % step)]
    if bad:
        found = ", ".join(map(str, bad))
        multiple = f"a positive multiple of {step} elements ({reader})"
        return f"strides {facts.strides}: {found} not {multiple}"
    return None


def statistic_refusal(facts: OperandFacts) -> str | None:
    """Why a value a row, such as the LSE, cannot be read in place, or None where it can."""
    if facts.shape[-1] > 1 and facts.strides[-1] != 1:
        return f"last stride {facts.strides[-1]}, the kernels want 1"
    return None


def _in_a_row(calls: tuple[KernelCall, ...], arch: ArchSpec) -> tuple[KernelCall, ...]:
    """Each but the first starts while the one before it ends, where the GPU can do that."""
    if "dependent_launch" not in arch.features:
        return calls
    first, *others = calls
    return (first, *(replace(c, spec=replace(c.spec, dependent=True)) for c in others))


def _backward_calls(
    problem: AttnProblem,
    main: KernelRef,
    config: BackwardConfig | BackwardConfigSm80,
    arch: ArchSpec,
    tables: TileTables,
    swizzle: int,
) -> Iterator[KernelCall]:
    """Before, main and after; nothing comes after where dQ is not asked for.

    A gradient that is not asked for is never written: its place is taken by its input. The kernels
    before and after see no mask, so they are compiled once for all of them.
    """
    p = problem
    rowwise = Signature(p.dtype, MaskKind.FULL, packed=p.is_packed)
    order = config.accumulator_order
    before = PreprocessConfig(config.tile_m, zero_dq=order if config.needs("dq") else None)
    over_queries = tables.grid("q", p.heads_q, _ceil_div(p.seqlen_q, config.tile_m))
    yield KernelCall(
        KernelSpec(PREPROCESS, before, rowwise, arch.name),
        (*PREPROCESS_OPERANDS, tables.operand("q")),
        over_queries,
    )
    gradients = tuple(name if config.needs(name) else name[1:] for name in ("dk", "dv"))
    call = KernelCall(
        KernelSpec(main, config, p.signature, arch.name),
        (*BACKWARD_INPUTS, *gradients, tables.operand("k"), *SCALARS),
        tables.grid("k", p.heads_k, _ceil_div(p.seqlen_k, config.tile_n)),
    )
    yield placed(call, p, arch, swizzle)
    if config.needs("dq"):
        after = PostprocessConfig(config.tile_m, order)
        yield KernelCall(
            KernelSpec(POSTPROCESS, after, rowwise, arch.name),
            (*POSTPROCESS_OPERANDS, tables.operand("q"), "softmax_scale"),
            over_queries,
        )


def _accumulator_shape(
    problem: AttnProblem, config: BackwardConfig | BackwardConfigSm80, query_blocks: int
) -> tuple[int, ...]:
    if config.accumulator_order is AccumulatorOrder.ROWS:
        return _results(problem, ("dq",))[0].shape
    columns = config.accumulator_order.columns(problem.head_dim)
    return (problem.batch, problem.heads_q, query_blocks, config.tile_m * columns)


def _scalars(problem: AttnProblem, most: int, swizzle: int) -> tuple[tuple[str, float | int], ...]:
    """The numbers that kernels take."""
    p = problem
    left, right = (
        UNBOUNDED if bound is None else min(bound, UNBOUNDED)
        for bound in (p.mask.left, p.mask.right)
    )
    return (
        ("softmax_scale", p.softmax_scale),
        ("softcap", p.softcap),
        ("window_left", left),
        ("window_right", right),
        ("max_ctas", most),
        ("head_swizzle", swizzle),
        ("total_q", p.seqlen_q),
        ("total_k", p.seqlen_k),
    )


def _results(problem: AttnProblem, names: Iterable[str]) -> tuple[Buffer, ...]:
    expected = expected_facts(problem)
    return tuple(Buffer(name, *expected[name]) for name in names)


def _ceil_div(size: int, step: int) -> int:
    return -(-size // step)
