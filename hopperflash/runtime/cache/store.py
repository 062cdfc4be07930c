"""A folder of compiled kernels: one file each, written at once or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import tempfile
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hopperflash.emulator import HostObject
from hopperflash.runtime.cache import trust
from hopperflash.runtime.cache.key import CacheKey
from hopperflash.runtime.kernel import KernelBinary

_SUFFIX, _PARTIAL = ".kernel", ".partial"
_ABANDONED_SECONDS = 3600
_CHECKSUM_BYTES = hashlib.sha256().digest_size


class Unusable(Exception):
    """An entry that must not be used, and why; what asked for it compiles."""


@dataclass(frozen=True)
class Entry:
    """A file of the cache; `used` is when it was last read or written, in seconds of the epoch."""

    path: Path
    bytes: int
    used: float


class Store:
    """A folder of kernels; `owners` are the users whose files in it may be executed."""

    def __init__(self, folder: Path, owners: frozenset[int] | None = None) -> None:
        self.folder = folder
        self._owners = trust.own() if owners is None else owners

    def read(self, key: CacheKey) -> KernelBinary | None:
        """The kernel of a key, or None where there is none; counts as use.

        Raises `Unusable` for an entry that is broken or that another user could have written.
        """
        path = self.folder / key.file_name
        try:
            found, binary = self.load(path)
        except FileNotFoundError:
            return None
        if found != key:
            raise Unusable(f"{path} holds another kernel than its name says")
        # A folder that is only readable keeps no order of use.
        with contextlib.suppress(OSError):
            os.utime(path)
        return binary

    def load(self, path: Path) -> tuple[CacheKey, KernelBinary]:
        """An entry's key and kernel; raises as `read` does."""
        try:
            with open(path, "rb", opener=_no_link) as file:
                facts = (self.folder.stat(), os.fstat(file.fileno()))
                content = file.read()
        except FileNotFoundError:
            raise
        except OSError as error:
            raise Unusable(f"{path} cannot be read: {error.strerror}") from error
        for place, fact in zip((self.folder, path), facts, strict=True):
            reason = trust.distrust(fact, self._owners)
            if reason is not None:
                raise Unusable(f"{place} is not trusted: {reason}")
        try:
            return unpack(content)
        except ValueError as broken:
            raise Unusable(f"{path} is broken: {broken}") from None

    def write(self, key: CacheKey, binary: KernelBinary) -> Path:
        """Publishes a kernel: readers see all of it or nothing; raises `OSError`."""
        trust.make_private(self.folder)
        path = self.folder / key.file_name
        descriptor, partial = tempfile.mkstemp(dir=self.folder, suffix=_PARTIAL)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(pack(key, binary))
                file.flush()
                os.fsync(file.fileno())
            Path(partial).replace(path)
        except BaseException:
            Path(partial).unlink(missing_ok=True)
            raise
        return path

    def distrust(self) -> str | None:
        """Why nothing in the folder is used, whatever its files are; None where they decide."""
        if not self.folder.exists():
            return None
        reason = trust.distrust(self.folder.stat(), self._owners)
        return reason and f"{self.folder} is not trusted: {reason}"

    def entries(self) -> list[Entry]:
        """All entries, the longest unused first."""
        return sorted(self._files(_SUFFIX), key=lambda entry: entry.used)

    def of_kernel(self, key: CacheKey) -> list[Entry]:
        """The entries of a kernel, whatever installation compiled them."""
        return [entry for entry in self.entries() if key.kernel_id in entry.path.name]

    def evict(self, limit_bytes: int) -> list[Entry]:
        """Deletes the longest unused entries until the rest fits, and what killed writers left."""
        abandoned = time.time() - _ABANDONED_SECONDS
        for partial in self._files(_PARTIAL):
            if partial.used < abandoned:
                partial.path.unlink(missing_ok=True)
        entries = self.entries()
        excess = sum(entry.bytes for entry in entries) - limit_bytes
        evicted = []
        for entry in entries:
            if excess <= 0:
                break
            entry.path.unlink(missing_ok=True)
            excess -= entry.bytes
            evicted.append(entry)
        return evicted

    def _files(self, suffix: str) -> Iterator[Entry]:
        for path in self.folder.glob(f"*{suffix}"):
            # Another process may delete it meanwhile.
            with contextlib.suppress(FileNotFoundError):
                facts = path.stat()
                yield Entry(path, facts.st_size, facts.st_mtime)


def pack(key: CacheKey, binary: KernelBinary) -> bytes:
    """The content of an entry: a checksum, and a zip archive of the kernel's parts."""
    host = binary.host
    about = {
        "name": key.name,
        "spec": key.spec,
        "installation": key.installation,
        "function": host.function,
        "parameters": host.parameters,
        "symbols": host.symbols,
    }
    parts: dict[str, str | bytes] = {
        "about.json": json.dumps(about, indent=1),
        "host.o": host.code,
        "trampolines.o": host.trampolines,
        "kernel.ptx": binary.ptx,
        "kernel.cubin": binary.cubin,
    }
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
    body = buffer.getvalue()
    return hashlib.sha256(body).digest() + body


def unpack(content: bytes) -> tuple[CacheKey, KernelBinary]:
    """The inverse of `pack`; raises `ValueError` where the checksum is another."""
    checksum, body = content[:_CHECKSUM_BYTES], content[_CHECKSUM_BYTES:]
    if hashlib.sha256(body).digest() != checksum:
        raise ValueError(f"the checksum of its {len(content)} bytes is another")
    with zipfile.ZipFile(io.BytesIO(body)) as archive:
        about = json.loads(archive.read("about.json"))
        host = HostObject(
            function=about["function"],
            parameters=tuple(about["parameters"]),
            code=archive.read("host.o"),
            trampolines=archive.read("trampolines.o"),
            symbols=tuple(about["symbols"]),
        )
        ptx, cubin = archive.read("kernel.ptx").decode(), archive.read("kernel.cubin")
    installation = tuple((part, value) for part, value in about["installation"])
    key = CacheKey(about["name"], about["spec"], installation)
    return key, KernelBinary(host, ptx, cubin)


def _no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW)
