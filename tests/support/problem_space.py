"""Which options combine with which, on which backend: `supports`, as docs/problem_space.md."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any, get_args

from hopperflash.errors import InvalidArgument
from hopperflash.plan import arch_of, supports
from hopperflash.problem import AttnOptions, AttnProblem, Direction, OperandFacts, build_problem

PAGE = Path(__file__).parents[2] / "docs" / "problem_space.md"
TARGETS = {"sm90": "sm_90a", "sm80": "sm_80", "cpu": "cpu"}  # arch by backend
DIRECTIONS: tuple[Direction, ...] = get_args(Direction)


@dataclass(frozen=True)
class Option:
    """Something that users ask for; options of one `kind` exclude one another."""

    name: str
    kind: str
    options: Mapping[str, Any] = field(default_factory=dict)  # fields of AttnOptions
    sizes: Mapping[str, Any] = field(default_factory=dict)  # arguments of `problem_of`


OPTIONS = (
    Option("full", "mask"),
    Option("causal", "mask", {"causal": True}),
    Option("window (left, right)", "mask", {"window_size": (100, 20)}),
    Option("window, one side", "mask", {"window_size": (100, -1)}),
    Option("causal window", "mask", {"causal": True, "window_size": (100, -1)}),
    Option("softcap", "cap", {"softcap": 30.0}),
    Option("packed sequences", "layout", sizes={"lengths": ("cu_seqlens_q", "cu_seqlens_k")}),
    Option(
        "packed, seqused",
        "layout",
        sizes={"lengths": ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")},
    ),
    Option("GQA", "heads", sizes={"heads_k": 3}),
    Option("MQA", "heads", sizes={"heads_k": 1}),
    Option("head_dim 8", "head dims", sizes={"head_dims": (8, 8)}),
    Option("head_dim 256", "head dims", sizes={"head_dims": (256, 256)}),
    Option("head dims 192, 128", "head dims", sizes={"head_dims": (192, 128)}),
    Option("head dims 64, 128", "head dims", sizes={"head_dims": (64, 128)}),
    Option("fp16", "dtype", sizes={"dtype": "float16"}),
    Option("deterministic", "order", {"deterministic": True}),
    Option("any strides", "strides", sizes={"last_stride": 2}),
    Option("softmax_scale <= 0", "scale", {"softmax_scale": -1.0}),
    Option("dropout", "dropout", {"dropout_p": 0.1}),
    Option("ALiBi", "bias", {"alibi": True}),
)


def problem_of(*chosen: Option, device: str = "cuda") -> AttnProblem:
    """A problem with all of the options."""
    sizes: dict[str, Any] = {}
    options: dict[str, Any] = {}
    for option in chosen:
        sizes |= option.sizes
        options |= option.options
    (head_dim, head_dim_v), dtype = sizes.get("head_dims", (64, 64)), sizes.get("dtype", "bfloat16")
    last_stride, lengths = sizes.get("last_stride", 1), sizes.get("lengths")

    def facts(*shape: int, dtype: str = dtype) -> OperandFacts:
        strides = tuple(last_stride * math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
        return OperandFacts(shape, strides, 16, dtype, device)

    rows = (2,) if lengths is None else ()
    heads_k = sizes.get("heads_k", 6)
    given = None
    if lengths is not None:
        counts = {name: 8 if name.startswith("cu_") else 7 for name in lengths}
        given = {n: OperandFacts((c,), (1,), 16, "int32", device) for n, c in counts.items()}
    return build_problem(
        facts(*rows, 300, 6, head_dim),
        facts(*rows, 500, heads_k, head_dim),
        facts(*rows, 500, heads_k, head_dim_v),
        AttnOptions(**options),
        given,
    )


def refusals(backend: str, *chosen: Option) -> tuple[str, ...]:
    """Why a backend does not compute these options, in one direction or the other."""
    arch = arch_of(TARGETS[backend])
    device = "cpu" if backend == "cpu" else "cuda"
    try:
        given = problem_of(*chosen, device=device)
    except InvalidArgument as refused:
        return refused.reasons
    found = [supports(given, arch, direction, backend).reasons for direction in DIRECTIONS]
    return tuple(dict.fromkeys(reason for reasons in found for reason in reasons))


def render() -> str:
    """The page."""
    return "\n".join([
        "# Which options combine",
        "",
        "Written by `python -m tests.support.problem_space` from what `hopperflash.supports` says;",
        "a test holds it against that. What is said of an option holds of forward and backward.",
        "",
        "## Options",
        "",
        f"| option | {' | '.join(TARGETS)} |",
        f"| --- | {' | '.join('---' for _ in TARGETS)} |",
        *map(_row, OPTIONS),
        "",
        "## Pairs",
        "",
        *_pairs(),
    ]) + "\n"  # fmt: skip


def _row(option: Option) -> str:
    return f"| {option.name} | {' | '.join(_answer(backend, option) for backend in TARGETS)} |"


def _answer(backend: str, option: Option) -> str:
    reasons = refusals(backend, option)
    return "; ".join(reason.removeprefix(f"{backend}: ") for reason in reasons) or "yes"


def _pairs() -> list[str]:
    """Pairs of which a backend takes each option alone but not both; options of a kind exclude one
    another."""
    lines = []
    for backend in TARGETS:
        able = [option for option in OPTIONS if not refusals(backend, option)]
        pairs = [(a, b) for a, b in combinations(able, 2) if a.kind != b.kind]
        refused = [(a, b, why) for a, b in pairs if (why := refusals(backend, a, b))]
        end = ", except:" if refused else "."
        lines.append(
            f"* `{backend}`: each option that it takes with every other ({len(pairs)} pairs){end}"
        )
        lines += [f"  * {a.name} with {b.name}: {'; '.join(why)}" for a, b, why in refused]
    return lines


if __name__ == "__main__":
    PAGE.write_text(render())
