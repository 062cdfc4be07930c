"""The Hopper backend: what it takes, and the launch it makes of it."""

from __future__ import annotations

from hopperflash.plan.arch import ArchSpec
from hopperflash.plan.budget import check
from hopperflash.plan.launch_plan import Copy, KernelCall, KernelRef, KernelSpec, Steps
from hopperflash.plan.support import Support
from hopperflash.plan.tiles_sm90 import forward_config, forward_tile
from hopperflash.problem import AttnProblem, Direction, MaskKind, OperandFacts

FORWARD = KernelRef("hopperflash.kernels.sm90.fwd.kernel", "ForwardSm90")
FORWARD_OPERANDS = ("q", "k", "v", "out", "lse", "softmax_scale")

TMA_ALIGNMENT = 16
GRID_YZ_MAX = 65535
# Device coordinates are 32-bit and run past a sequence by less than one tile.
SEQLEN_MAX = 2**31 - 256
# The row maximum is taken before scaling, which asks for a positive scale, and the scale is
# multiplied by log2(e) in fp32.
SCALE_RANGE = (2.0**-126, 2.0**127)


def supports(problem: AttnProblem, arch: ArchSpec, direction: Direction) -> Support:
    """Whether the wgmma kernels compute `problem` on `arch`."""
    reasons = []
    if "wgmma" not in arch.features:
        reasons.append(f"arch {arch.name} has no wgmma")
    if direction == "backward":
        reasons.append("its backward kernels are not written yet")
    if problem.mask.kind is MaskKind.WINDOW:
        reasons.append(f"its kernels cannot mask a {problem.mask} yet")
    if problem.head_dim != problem.head_dim_v:
        reasons.append(
            f"head_dim {problem.head_dim} and head_dim_v {problem.head_dim_v} differ:"
            " its kernels want equal ones yet"
        )
    if problem.softcap > 0.0:
        reasons.append(f"softcap {problem.softcap}: its kernels do not cap scores yet")
    reasons += _limit_reasons(problem)
    if not reasons:
        reasons += _tile_reasons(problem, arch)
    return Support.unless(reasons)


def steps(problem: AttnProblem, arch: ArchSpec, direction: Direction) -> Steps:
    """One launch of the forward kernel, one CTA per tile of queries, query head and batch entry."""
    tile = forward_tile(problem.head_dim, problem.mask.kind)
    config = forward_config(tile)
    grid = (-(-problem.seqlen_q // config.tile_m), problem.heads_q, problem.batch)
    spec = KernelSpec(FORWARD, config, problem.signature, arch.name)
    return Steps(
        calls=(KernelCall(spec, FORWARD_OPERANDS, grid),),
        copies=tuple(
            Copy(name, reason)
            for name, facts in problem.operands
            if (reason := tma_refusal(facts, problem.dtype.itemsize))
        ),
        reasons=(f"tile {config.tile_m}x{config.tile_n}: {tile.source}",),
    )


def tma_refusal(facts: OperandFacts, itemsize: int) -> str | None:
    """Why TMA cannot read an operand in place, or None where it can.

    TMA wants an aligned base, a last stride of 1, and every other stride a positive multiple of
    16 bytes. The stride of a dimension of length 1 is never used and may be anything.
    """
    if facts.alignment % TMA_ALIGNMENT:
        return f"base address aligned to {facts.alignment} bytes, TMA wants {TMA_ALIGNMENT}"
    *outer, (last_length, last_stride) = zip(facts.shape, facts.strides, strict=True)
    if last_length > 1 and last_stride != 1:
        return f"last stride {last_stride}, TMA wants 1"
    step = TMA_ALIGNMENT // itemsize
    bad = [stride for length, stride in outer if length > 1 and (stride <= 0 or stride % step)]
    if bad:
        found = ", ".join(map(str, bad))
        return f"strides {facts.strides}: {found} not a positive multiple of {step} elements (TMA)"
    return None


def _limit_reasons(problem: AttnProblem) -> list[str]:
    reasons = [
        f"{name} {size} exceeds {limit} ({why})"
        for name, size, limit, why in (
            ("heads", problem.heads_q, GRID_YZ_MAX, "grid y"),
            ("batch", problem.batch, GRID_YZ_MAX, "grid z"),
            ("seqlen_q", problem.seqlen_q, SEQLEN_MAX, "32-bit coordinates"),
            ("seqlen_k", problem.seqlen_k, SEQLEN_MAX, "32-bit coordinates"),
        )
        if size > limit
    ]
    low, high = SCALE_RANGE
    if not low <= problem.softmax_scale <= high:
        reasons.append(
            f"softmax_scale {problem.softmax_scale:g}: its kernels take {low:.3g} to {high:.3g}"
        )
    return reasons


def _tile_reasons(problem: AttnProblem, arch: ArchSpec) -> list[str]:
    """The arithmetic that rules the table's tile out, so that a bad edit cannot be launched."""
    config = forward_config(forward_tile(problem.head_dim, problem.mask.kind))
    name = f"tile {config.tile_m}x{config.tile_n} at head_dim {config.head_dim}"
    return [f"{name}: {reason}" for reason in check(config, arch, problem.dtype).reasons]
