"""`hopperflash cache`: what is in the compile cache, filling it, checking it, emptying it."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from hopperflash.cli.options import command, flag
from hopperflash.cli.output import WRONG, print_json, stderr, stdout
from hopperflash.cli.warm import warm
from hopperflash.emulator import link
from hopperflash.runtime.cache import Entry, Store, Unusable, own_store, seed_store, size_limit
from hopperflash.runtime.cache.key import CacheKey, installation

MIB = 1 << 20

app = typer.Typer(help="The kernels kept on disk; see docs/cache.md.", no_args_is_help=True)


@dataclass(frozen=True)
class Found:
    """An entry and what is in it; `problem` is why it is not used, "" where it is sound."""

    path: str
    bytes: int
    used: str
    """When it was last read or written."""
    name: str = ""
    entry: str = ""
    """What the kernel is called in its PTX: dtype, head dims, tile, mask."""
    spec: str = ""
    installation: dict[str, str] = field(default_factory=dict)
    current: bool = False
    """Whether it was compiled by this installation, which alone will use it."""
    problem: str = ""


@dataclass(frozen=True)
class CacheOptions:
    """What `hopperflash cache list` and `verify` take."""

    json: Annotated[bool, flag("Print one JSON document.", "--json")] = False


@dataclass(frozen=True)
class ClearOptions:
    """What `hopperflash cache clear` takes."""

    stale: Annotated[bool, flag("Only kernels this installation will not use.", "--stale")] = False
    json: Annotated[bool, flag("Print one JSON document.", "--json")] = False


@command(CacheOptions)
def list_entries(options: CacheOptions) -> None:
    """Print the kernels of the cache, the last used first."""
    store = own_store()
    found = [_inspect(store, entry) for entry in reversed(store.entries())]
    total = sum(entry.bytes for entry in found)
    if options.json:
        print_json({
            "folder": str(store.folder),
            "bytes": total,
            "limit_bytes": size_limit(),
            "entries": found,
        })  # fmt: skip
        return
    console = stdout()
    for entry in found:
        state = entry.problem or ("current" if entry.current else "of another installation")
        label = f"{entry.name}  {entry.entry}" if entry.name else Path(entry.path).name
        console.print(f"{entry.used}  {entry.bytes:>8} B  {label}  {state}", markup=False)
    limit = size_limit() // MIB
    summary = f"{len(found)} kernels, {total / MIB:.1f} MiB of {limit} MiB in {store.folder}"
    console.print(summary, markup=False)


@command(CacheOptions)
def verify(options: CacheOptions) -> None:
    """Check every kernel of the cache and of the seed folder: owner, mode, checksum, and that its
    host code links.

    Exits 1 if one will not be used. Such a kernel is compiled anew when it is next asked for.
    """
    stores = [store for store in (seed_store(), own_store()) if store is not None]
    found = [_inspect(store, entry, linked=True) for store in stores for entry in store.entries()]
    broken = [entry for entry in found if entry.problem]
    if options.json:
        print_json({"ok": not broken, "kernels": len(found), "broken": broken})
    else:
        for entry in broken:
            stdout().print(entry.problem, markup=False)
        stdout().print(f"{len(found) - len(broken)} kernels are sound", markup=False)
    if broken:
        stderr().print(f"WRONG: {len(broken)} kernels will not be used", markup=False)
        raise typer.Exit(WRONG)


@command(ClearOptions)
def clear(options: ClearOptions) -> None:
    """Delete the kernels of the cache; the seed folder stays as it is."""
    store, kept = own_store(), 0
    deleted: list[Entry] = []
    for entry in store.entries():
        if options.stale and _inspect(store, entry).current:
            kept += 1
            continue
        entry.path.unlink(missing_ok=True)
        deleted.append(entry)
    total = sum(entry.bytes for entry in deleted)
    if options.json:
        print_json({"folder": str(store.folder), "deleted": len(deleted), "bytes": total,
                    "kept": kept})  # fmt: skip
    else:
        summary = f"deleted {len(deleted)} kernels, {total / MIB:.1f} MiB, kept {kept}"
        stdout().print(summary, markup=False)


def _inspect(store: Store, entry: Entry, *, linked: bool = False) -> Found:
    path, used = str(entry.path), datetime.fromtimestamp(entry.used).isoformat(" ", "seconds")
    try:
        key, binary = store.load(entry.path)
    except (Unusable, FileNotFoundError) as refused:
        return Found(path, entry.bytes, used, problem=str(refused))
    problem = ""
    if linked:
        try:
            link(binary.host.code, binary.host.trampolines).get_function(binary.host.function)
        except Exception as unlinkable:
            problem = f"{path} does not link: {unlinkable}"
    current = _is_current(key)
    facts = dict(key.installation)
    return Found(path, entry.bytes, used, key.name, binary.entry, key.spec, facts, current, problem)


def _is_current(key: CacheKey) -> bool:
    return set(installation()) <= set(key.installation)


app.command("list")(list_entries)
app.command("warm")(warm)
app.command("verify")(verify)
app.command("clear")(clear)
