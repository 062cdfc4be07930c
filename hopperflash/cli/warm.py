"""`hopperflash cache warm`: compile a set of problems into the cache, in parallel."""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import product
from multiprocessing import get_context
from time import perf_counter
from typing import Annotated

import typer

from hopperflash import env
from hopperflash.cli.explain import ExplainOptions, plan_of
from hopperflash.cli.options import DTypeName, SmMargin, command, flag, size
from hopperflash.cli.output import WRONG, Stages, print_json, stages, stderr, stdout
from hopperflash.errors import CompileError, HopperflashError, InvalidArgument
from hopperflash.plan import KernelSpec
from hopperflash.runtime.cache import Unusable, key_of, own_store
from hopperflash.runtime.compile import warm_kernel

_MASKS = {"causal": True, "full": False}
# (batch, length). Schedulers of kernels and their pairs of CTAs depend on how many tiles there are
# and how long: one, a few, many blocks in each, and many tiles.
_SIZES = ((1, 1), (1, 512), (1, 8192), (64, 2048))


@dataclass(frozen=True)
class WarmOptions:
    """What `hopperflash cache warm` takes: lists are multiplied; kernels serve any length."""

    arch: Annotated[str, flag("Targets: sm_90a,sm_80.")] = "sm_90a"
    direction: Annotated[str, flag("Directions.")] = "forward,backward"
    dtype: Annotated[str, flag("Element types: bf16,fp16.")] = "bf16"
    head_dim: Annotated[str, flag("Head dims: 64,128.")] = "128"
    mask: Annotated[str, flag("Masks: causal,full.")] = "causal"
    head_dim_v: Annotated[int | None, flag("Head dim of V.", show_default="head_dim")] = None
    heads: Annotated[int | None, flag("Query heads.", show_default="2")] = None
    kv_heads: Annotated[int | None, flag("Key heads; divides heads.")] = None
    packed: Annotated[bool, flag("Packed sequences.", "--packed")] = False
    window: Annotated[str | None, flag("LEFT,RIGHT keys a query sees; -1 is unbounded.")] = None
    softcap: Annotated[float, flag("Caps scores at this; 0 for none.")] = 0.0
    sm_margin: SmMargin = 0
    backend: Annotated[str | None, flag("sm90 or sm80; by default the first able one.")] = None
    jobs: Annotated[int | None, size("Processes.", "CPUs")] = None
    json: Annotated[bool, flag("Print one JSON document.", "--json")] = False


@dataclass(frozen=True)
class Warmed:
    """What became of one kernel; `error` is why it is not in the cache, "" where it is.

    `entry` is what it is called in its PTX: dtype, head dims, tile, mask.
    """

    name: str
    entry: str
    compiled: bool
    seconds: float
    error: str = ""


@command(WarmOptions)
def warm(options: WarmOptions) -> None:
    """Compile a set of problems into the cache, in parallel processes; no GPU is needed.

    Exits 1 if a kernel did not compile or could not be kept, 2 if a problem is refused.
    """
    if not env.cache_enabled():
        raise InvalidArgument(f"{env.CACHE} is off: there is no cache to fill")
    specs = kernels_of(options)
    start = perf_counter()
    with stages() as progress:
        results = warm_all(specs, options.jobs, progress)
    seconds = perf_counter() - start
    failed = [result for result in results if result.error]
    folder = own_store().folder
    if options.json:
        print_json({"ok": not failed, "folder": str(folder), "kernels": results,
                    "seconds": seconds})  # fmt: skip
    else:
        for result in results:
            state = result.error or ("compiled" if result.compiled else "was there")
            label = f"{result.name}  {result.entry}"
            stdout().print(f"{result.seconds:6.1f} s  {label}  {state}", markup=False)
        sound = len(results) - len(failed)
        stdout().print(f"{sound} kernels in {folder} after {seconds:.1f} s", markup=False)
    if failed:
        stderr().print(f"WRONG: {len(failed)} kernels are not in the cache", markup=False)
        raise typer.Exit(WRONG)


def kernels_of(options: WarmOptions) -> list[KernelSpec]:
    """The different kernels of every problem in the product of the lists.

    Raises `InvalidArgument` that holds every problem's refusal.
    """
    specs: dict[KernelSpec, None] = {}
    refusals: dict[str, None] = {}
    for problem in _problems(options):
        try:
            specs.update(dict.fromkeys(call.spec for call in plan_of(problem).calls))
        except HopperflashError as refused:
            refusals.update(dict.fromkeys(refused.reasons or [refused.headline]))
    if refusals:
        raise InvalidArgument("some of these problems have no plan:", refusals)
    return list(specs)


def _problems(options: WarmOptions) -> list[ExplainOptions]:
    dtypes = {item.value: item for item in DTypeName}
    head_dims = {text: int(text) for text in options.head_dim.split(",") if text.isdecimal()}
    reasons: list[str] = []

    def listed(name: str, text: str, known: Iterable[str], way_out: str) -> list[str]:
        items = text.split(",")
        reasons.extend(
            f"--{name} holds {item!r}: give {way_out}" for item in items if item not in known
        )
        return items

    chosen = product(
        listed("dtype", options.dtype, dtypes, ", ".join(dtypes)),
        listed("head-dim", options.head_dim, head_dims, "numbers such as 64,128"),
        listed("mask", options.mask, _MASKS, ", ".join(_MASKS)),
        options.arch.split(","),
        options.direction.split(","),
        _SIZES,
    )
    if reasons:
        raise InvalidArgument("these options are no lists of what can be compiled:", reasons)
    return [
        ExplainOptions(
            heads=options.heads,
            kv_heads=options.kv_heads,
            head_dim=head_dims[head_dim],
            dtype=dtypes[dtype],
            causal=_MASKS[mask],
            seqlen=None if options.packed else seqlen,
            batch=None if options.packed else batch,
            seqlens=",".join([str(seqlen)] * batch) if options.packed else None,
            window=options.window,
            softcap=options.softcap,
            sm_margin=options.sm_margin,
            head_dim_v=options.head_dim_v,
            arch=arch,
            direction=direction,
            backend=options.backend,
        )
        for dtype, head_dim, mask, arch, direction, (batch, seqlen) in chosen
    ]


def warm_all(specs: list[KernelSpec], jobs: int | None, progress: Stages) -> list[Warmed]:
    """Compiles what is not in the cache yet, each kernel in one process of a pool."""
    processes = min(jobs or len(os.sched_getaffinity(0)), len(specs)) or 1
    progress.enter(f"compiling {len(specs)} kernels in {processes} processes")
    # Not forked: the compiler's threads and torch's would not survive it.
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(_warm, spec): number for number, spec in enumerate(specs)}
        results: dict[int, Warmed] = {}
        for future in as_completed(futures):
            results[futures[future]] = future.result()
            progress.advance(len(results), len(specs))
    return [results[number] for number in range(len(specs))]


def _warm(spec: KernelSpec) -> Warmed:
    key, store, start = key_of(spec), own_store(), perf_counter()
    compiled, entry, error = False, "", ""
    try:
        compiled = warm_kernel(spec)
        binary = store.read(key)
        if binary is None:
            error = f"not kept in {store.folder}"
        else:
            entry = binary.entry
    except (CompileError, Unusable) as failed:
        error = str(failed)
    return Warmed(key.name, entry, compiled, perf_counter() - start, error)
