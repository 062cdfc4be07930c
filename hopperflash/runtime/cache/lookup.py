"""Finds a kernel on disk, or has it compiled once for all processes of the machine."""

from __future__ import annotations

import hashlib
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from os import geteuid
from pathlib import Path

import platformdirs
from filelock import FileLock, Timeout

from hopperflash import env
from hopperflash.plan import KernelSpec
from hopperflash.runtime.cache import trust
from hopperflash.runtime.cache.key import CacheKey, key_of
from hopperflash.runtime.cache.store import Store, Unusable
from hopperflash.runtime.kernel import KernelBinary
from hopperflash.runtime.log import logger

_DEFAULT_MIB = 1024
# Longer than any kernel takes; the lock of a process that died is free at once.
_PATIENCE_SECONDS = 900
_POLL_SECONDS = 0.02

Compile = Callable[[KernelSpec], KernelBinary]


def obtain(spec: KernelSpec, compile_: Compile) -> KernelBinary:
    """The kernel of a spec: from the seed, from this user's cache, or from `compile_`.

    Processes of this machine that ask at the same time wait for the one that compiles. Trouble
    with the disk is logged and never keeps a kernel from being compiled.
    """
    if not env.cache_enabled():
        logger().info("compile %s for %s: %s is off", spec.ref.name, spec.target, env.CACHE)
        return compile_(spec)
    key, store = key_of(spec), own_store()
    seed = seed_store()
    binary = _read(seed, key) if seed is not None else None
    binary = binary or _read(store, key)
    if binary is not None:
        return binary
    with _sole_compiler(store.folder / key.file_name):
        binary = _read(store, key)
        if binary is None:
            logger().info("compile %s: %s", key.name, reason_to_compile(store, key))
            start = time.perf_counter()
            binary = compile_(spec)
            logger().info("compiled %s in %.1f s", key.name, time.perf_counter() - start)
            _write(store, key, binary)
    return binary


def own_store() -> Store:
    """This user's cache."""
    return Store(env.cache_dir() or platformdirs.user_cache_path("hopperflash"))


def seed_store() -> Store | None:
    """The folder to look into first, if one is given.

    Who names it trusts its owner; what anybody else could have written is still refused.
    """
    folder = env.cache_seed()
    if folder is None or not folder.is_dir():
        return None
    return Store(folder, trust.own() | {folder.stat().st_uid})


def size_limit() -> int:
    """Bytes that the cache may take."""
    return env.cache_bytes(_DEFAULT_MIB)


def reason_to_compile(store: Store, key: CacheKey) -> str:
    """Which part of a key is new to a store."""
    for entry in reversed(store.of_kernel(key)):
        try:
            known, _ = store.load(entry.path)
        except (Unusable, FileNotFoundError):
            continue
        differences = key.differences(known)
        return "; ".join(differences) if differences else "its entry was not usable"
    return f"{store.folder} has no such kernel: {key.spec}"


def _read(store: Store, key: CacheKey) -> KernelBinary | None:
    start = time.perf_counter()
    try:
        binary = store.read(key)
    except Unusable as refused:
        logger().warning("%s; it is compiled instead", refused)
        return None
    if binary is not None:
        milliseconds = (time.perf_counter() - start) * 1e3
        logger().debug("read %s from %s in %.1f ms", key.name, store.folder, milliseconds)
    return binary


def _write(store: Store, key: CacheKey, binary: KernelBinary) -> None:
    try:
        store.write(key, binary)
        evicted = store.evict(size_limit())
    except OSError as error:
        logger().warning("%s is not kept: %s", key.name, error)
        return
    if evicted:
        logger().info("evicted %d kernels: the cache may take %d bytes", len(evicted), size_limit())


@contextmanager
def _sole_compiler(path: Path) -> Iterator[None]:
    """Held by one process of this machine at a time, for one entry.

    The lock lies in the machine's own temporary folder, since locks on a shared file system may
    not hold. Without it a kernel may be compiled twice, which does no harm.
    """
    folder = Path(tempfile.gettempdir(), f"hopperflash-locks-{geteuid()}")
    name = hashlib.sha256(str(path.absolute()).encode()).hexdigest()[:32]
    lock = FileLock(folder / f"{name}.lock", mode=0o600)
    try:
        trust.make_private(folder)
        lock.acquire(timeout=_PATIENCE_SECONDS, poll_interval=_POLL_SECONDS)
    except (OSError, Timeout) as error:
        logger().warning("compiling without a lock: %s", error)
    try:
        yield
    finally:
        lock.release()
