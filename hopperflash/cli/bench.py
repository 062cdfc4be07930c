"""`hopperflash bench`: attention timed beside its peers, and no result that is wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.console import Console

from hopperflash.cli.options import SEED_MAX, DTypeName, command, flag, integers
from hopperflash.cli.output import WRONG, as_json, print_json, stages, stderr, stdout, table
from hopperflash.errors import InvalidArgument
from hopperflash.problem import Direction

if TYPE_CHECKING:
    from hopperflash.bench.cases import Grid
    from hopperflash.bench.run import Benchmark, Row

TO_STDOUT = Path("-")
# Head dims, lengths, tokens and heads * head_dim: as FlashAttention-2 and -3 report on a GPU; what
# takes a CPU minutes.
_ON_GPU = ((64, 128, 256), (512, 1024, 2048, 4096, 8192, 16384), 16384, 2048)
_ON_CPU = ((64, 128), (512, 1024), 1024, 256)
_EITHER = {
    "direction": ("forward", "backward"),
    "mask": ("full", "causal"),
    "l2": ("cold", "warm"),
}

ON_A_CPU = (
    "NO GPU IS TIMED: these are the `cpu` backend and PyTorch's CPU kernels, on small shapes. They"
    " say nothing about the Hopper kernels."
)


@dataclass(frozen=True)
class BenchOptions:
    """What `hopperflash bench` takes; None where the device decides."""

    device: Annotated[str | None, flag("cpu or cuda.", show_default="cuda if there is one")] = None
    against: Annotated[
        str, flag("Who is timed beside hopperflash, of those that docs/bench.md names.")
    ] = "sdpa-flash,sdpa-cudnn,sdpa-efficient,sdpa-math,fa2,fa3,fa4"
    direction: Annotated[str, flag("forward, backward or both.")] = "both"
    mask: Annotated[str, flag("full, causal or both.")] = "both"
    l2: Annotated[str, flag("cold, warm or both: what the cache holds before a call.")] = "both"
    head_dims: Annotated[
        str | None, flag("Such as 64,128.", show_default="64,128,256; on a CPU 64,128")
    ] = None
    seqlens: Annotated[
        str | None, flag("Such as 512,4096.", show_default="512 to 16384; on a CPU 512,1024")
    ] = None
    tokens: Annotated[
        int | None,
        typer.Option(help="batch * seqlen.", min=1, show_default="16384; on a CPU 1024"),
    ] = None
    batch: Annotated[
        int | None, typer.Option(help="Entries.", min=1, show_default="tokens / seqlen")
    ] = None
    heads: Annotated[
        int | None,
        typer.Option(help="Query heads.", min=1, show_default="2048 / head_dim; on a CPU 256 / it"),
    ] = None
    kv_heads: Annotated[
        int | None, typer.Option(help="Key heads.", min=1, show_default="heads")
    ] = None
    dtype: Annotated[DTypeName, flag("Element type.")] = DTypeName.BF16
    milliseconds: Annotated[int, typer.Option(help="Of timed calls per row.", min=1)] = 200
    warm_up: Annotated[int, typer.Option(help="Milliseconds before them.", min=0)] = 100
    seed: Annotated[int, flag("Of the random inputs.", min=0, max=SEED_MAX)] = 0
    json: Annotated[Path | None, flag("Write JSON here; - for stdout instead of a table.")] = None
    html: Annotated[Path | None, flag("Write a page with plots here, which needs no other.")] = None


@command(BenchOptions)
def bench(options: BenchOptions) -> None:
    """Time attention beside PyTorch's kernels and the flash-attn packages that are installed.

    Every result is first compared with fp64, and what is wrong is not timed; if it is hopperflash's
    the exit status is 1. On a machine without a GPU the cpu backend is timed, on small shapes.
    """
    found = benchmark_of(options)
    data = as_data(found)
    if options.json == TO_STDOUT:
        print_json(data)
    else:
        show(found, stdout())
        if options.json is not None:
            options.json.write_text(as_json(data))
    if options.html is not None:
        from hopperflash.bench.html import page

        options.html.write_text(page(found, list(facts(found))), encoding="utf-8")
    for line in dict.fromkeys(_untimed(row) for row in found.rows if row.seconds is None):
        stderr().print(line, markup=False)
    if found.failures:
        raise typer.Exit(WRONG)


def benchmark_of(options: BenchOptions) -> Benchmark:
    """Runs it; `InvalidArgument` lists all options that are wrong."""
    chosen = {name: _chosen(name, getattr(options, name)) for name in _EITHER}
    reasons = [reason for reason in chosen.values() if isinstance(reason, str)]
    if options.device not in (None, "cpu", "cuda"):
        reasons.append(f"--device is {options.device!r}: give cpu or cuda")
    if reasons:
        raise InvalidArgument("these options are not right:", reasons)
    with stages() as progress:
        progress.enter("loading torch")
        import torch

        from hopperflash.bench.implementations import OURS, implementations
        from hopperflash.bench.run import Settings, benchmark
        from hopperflash.bench.timing import Effort

        device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
        if device == "cuda" and not torch.cuda.is_available():
            raise InvalidArgument("--device is cuda: torch sees no CUDA device")
        if device == "cpu" and options.json == TO_STDOUT:  # the tables begin with it
            stderr().print(ON_A_CPU, style="bold", markup=False)
        grid = grid_of(options, device, [mask == "causal" for mask in chosen["mask"]])
        names = tuple(name for name in options.against.split(",") if name)
        settings = Settings(
            device=device,
            directions=cast("tuple[Direction, ...]", chosen["direction"]),
            caches=cast("tuple[Any, ...]", chosen["l2"]),
            effort=Effort(1e-3 * options.milliseconds, 1e-3 * options.warm_up),
            seed=options.seed,
        )
        contenders = implementations((OURS, *names), device)
        return benchmark(grid.shapes(), contenders, settings, progress.enter)


def grid_of(options: BenchOptions, device: str, masks: list[bool]) -> Grid:
    """The shapes asked for; `InvalidArgument` for sizes that make no problem."""
    from hopperflash.bench.cases import Grid

    head_dims, seqlens, tokens, model_dim = _ON_CPU if device == "cpu" else _ON_GPU
    grid = Grid(
        head_dims=_given("--head-dims", options.head_dims, head_dims),
        seqlens=_given("--seqlens", options.seqlens, seqlens),
        masks=masks,
        dtype=options.dtype.dtype,
        tokens=options.tokens or tokens,
        model_dim=model_dim,
        batch=options.batch,
        heads=options.heads,
        kv_heads=options.kv_heads,
    )
    reasons = [
        f"head dim {size}: give multiples of 8 from 8 to 256"
        for size in grid.head_dims
        if size not in range(8, 257, 8)
    ]
    reasons += [f"seqlen {size}: give lengths from 1 on" for size in grid.seqlens if size < 1]
    reasons += sorted(
        {
            f"{one.heads} heads of {one.head_dim} over {one.kv_heads} key heads: give a divisor"
            for one in (() if reasons else grid.shapes())
            if one.heads % one.kv_heads
        }
    )
    if reasons:
        raise InvalidArgument("these sizes make no attention problem:", reasons)
    return grid


def facts(found: Benchmark) -> Iterator[str]:
    """Where and how it was measured, who was not there, and what a FLOP is."""
    machine, effort = found.machine, found.effort
    if machine.device == "cpu":
        yield ON_A_CPU
    cuda = f", CUDA {machine.cuda}" if machine.cuda else ""
    yield f"{machine.name}; {machine.host}; {machine.started}"
    others = "".join(f", {name} {version}" for name, version in machine.libraries.items())
    yield f"hopperflash {machine.hopperflash}, torch {machine.torch}{cuda}{others}"
    yield from (f"{name} is not here: {why}" for name, why in found.absent.items())
    yield from found.conventions
    yield (
        f"medians of single calls over {1e3 * effort.timed:g} ms after {1e3 * effort.warm_up:g} ms"
        " of warm-up, in turns with the others; beside them the first and the last tenth"
    )
    yield (
        f"cold: {found.flush_bytes >> 20} MiB were overwritten before each call; warm: the same"
        " call ran before it"
    )
    if machine.clocks:
        yield f"clocks are not noted: {machine.clocks}"


def show(found: Benchmark, console: Console) -> None:
    """The facts, and a table for each direction, mask and state of the cache."""
    for fact in facts(found):
        console.print(fact, markup=False)
    unit, scale = found.unit
    groups: dict[str, list[Row]] = {}
    for row in found.rows:
        title = f"{row.direction}, {row.shape.mask}, {row.cache}"
        groups.setdefault(title, []).append(row)
    for title, rows in groups.items():
        shown = table(title, "head dim", "seqlen", "ms", "10 %", "90 %", unit, "SM MHz")
        for row in rows:
            shown.add_row(*_cells(row, scale))
        console.print()
        console.print(shown)


def _cells(row: Row, scale: float) -> Iterator[str]:
    yield row.implementation
    yield str(row.shape.head_dim)
    yield f"{row.shape.seqlen:,}"
    if row.seconds is None or row.flops_per_second is None:
        yield row.status
        return
    for seconds in (row.seconds.median, row.seconds.low, row.seconds.high):
        yield f"{1e3 * seconds:.4g}"
    yield f"{row.flops_per_second / scale:.4g}"
    yield "-".join(map(str, row.clocks.sm_mhz)) if row.clocks else ""


def _untimed(row: Row) -> str:
    return f"{row.status}: {row.implementation}, {row.direction}, {row.shape}: {row.why}"


def as_data(found: Benchmark) -> dict[str, Any]:
    """For programs; times in seconds."""
    plain = json.loads(as_json(found))
    for row, data in zip(found.rows, plain["rows"], strict=True):
        data["flops_per_second"] = row.flops_per_second
    return {"ok": not found.failures, **plain}


def _given(name: str, text: str | None, default: tuple[int, ...]) -> tuple[int, ...]:
    return default if text is None else integers(name, text, ",".join(map(str, default)))


def _chosen(name: str, value: str) -> tuple[str, ...] | str:
    """One of two or both; or what is wrong with it."""
    either = _EITHER[name]
    if value == "both":
        return either
    if value in either:
        return (value,)
    return f"--{name} is {value!r}: give {', '.join(either)} or both"
