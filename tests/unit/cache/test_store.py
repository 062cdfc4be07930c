"""Entries on disk: whole or absent, trusted or refused, the longest unused deleted first."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hopperflash.runtime.cache import Store, Unusable
from hopperflash.runtime.cache.store import pack, unpack
from tests.support.cached_kernels import binary, key

ROOT = Path(__file__).parents[3]
OTHER_USER = 54321


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "cache")


def test_reads_what_was_written(store):
    path = store.write(key(), binary())
    assert store.read(key()) == binary()
    assert store.read(key(head_dim=128)) is None
    assert path.name == key().file_name
    assert [entry.path for entry in store.entries()] == [path]
    assert (store.folder.stat().st_mode & 0o777, path.stat().st_mode & 0o777) == (0o700, 0o600)


def test_another_write_replaces_the_entry(store):
    store.write(key(), binary(b"old"))
    store.write(key(), binary(b"new"))
    found = store.read(key())
    assert found is not None and found.host.code == b"new"
    assert len(list(store.folder.iterdir())) == 1


def test_every_truncation_is_seen():
    content = pack(key(), binary())
    assert unpack(content) == (key(), binary())
    for length in range(len(content)):
        with pytest.raises(ValueError, match="checksum"):
            unpack(content[:length])


def test_every_flipped_bit_is_seen():
    content = pack(key(), binary())
    for position in range(len(content)):
        flipped = bytearray(content)
        flipped[position] ^= 1 << position % 8
        with pytest.raises(ValueError, match="checksum"):
            unpack(bytes(flipped))


def test_a_broken_entry_is_unusable(store):
    path = store.write(key(), binary())
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(Unusable, match="is broken"):
        store.read(key())


def test_an_entry_under_another_name_is_unusable(store):
    path = store.write(key(), binary())
    path.rename(store.folder / key(head_dim=128).file_name)
    with pytest.raises(Unusable, match="another kernel"):
        store.read(key(head_dim=128))


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_a_file_that_others_may_write_is_refused(store, mode):
    store.write(key(), binary()).chmod(mode)
    with pytest.raises(Unusable, match="lets others write"):
        store.read(key())


@pytest.mark.parametrize("mode", [0o720, 0o702])
def test_a_folder_that_others_may_write_is_refused(store, mode):
    store.write(key(), binary())
    store.folder.chmod(mode)
    with pytest.raises(Unusable, match="lets others write"):
        store.read(key())
    with pytest.raises(PermissionError, match="lets others write"):
        store.write(key(), binary())


def test_an_entry_of_an_untrusted_owner_is_refused(store):
    store.write(key(), binary())
    with pytest.raises(Unusable, match=f"belongs to user {os.geteuid()}"):
        Store(store.folder, owners=frozenset({OTHER_USER})).read(key())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
@pytest.mark.parametrize("given_away", ["file", "folder"])
def test_what_another_user_owns_is_refused(store, given_away):
    path = store.write(key(), binary())
    os.chown(path if given_away == "file" else store.folder, OTHER_USER, OTHER_USER)
    with pytest.raises(Unusable, match=f"belongs to user {OTHER_USER}"):
        store.read(key())


def test_a_link_is_not_followed(store, tmp_path):
    path = store.write(key(), binary())
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Unusable, match="cannot be read"):
        store.read(key())


def test_a_killed_writer_leaves_no_entry(store):
    code = f"""
import os, signal
from pathlib import Path
from hopperflash.runtime.cache import Store
from tests.support.cached_kernels import binary, key
os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)
Store(Path({str(store.folder)!r})).write(key(), binary())
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False)
    assert run.returncode == -signal.SIGKILL
    (partial,) = store.folder.iterdir()
    assert partial.stat().st_size > 0
    assert store.read(key()) is None
    assert store.entries() == []
    store.write(key(), binary())
    assert store.read(key()) == binary()
    os.utime(partial, (0, 0))
    store.evict(limit_bytes=1 << 20)
    assert [path.name for path in store.folder.iterdir()] == [key().file_name]


def test_a_failed_write_leaves_nothing(store, monkeypatch):
    def full(descriptor: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        store.write(key(), binary())
    assert list(store.folder.iterdir()) == []


def test_the_longest_unused_entries_are_evicted(store):
    head_dims = (64, 96, 128, 192)
    paths = [store.write(key(head_dim), binary(size=4000)) for head_dim in head_dims]
    for age, path in enumerate(reversed(paths)):
        os.utime(path, (1e9 - age, 1e9 - age))
    assert store.read(key(head_dims[0])) is not None
    size = paths[0].stat().st_size
    evicted = store.evict(limit_bytes=2 * size + size // 2)
    assert [entry.path for entry in evicted] == [paths[1], paths[2]]
    assert {entry.path for entry in store.entries()} == {paths[0], paths[3]}
    assert store.evict(limit_bytes=2 * size + size // 2) == []


def test_entries_of_a_kernel_are_found_whatever_compiled_them(store):
    older = replace(key(), installation=(*key().installation[:-1], ("settings", "older")))
    store.write(older, binary())
    store.write(key(head_dim=128), binary())
    assert store.read(key()) is None
    assert [entry.path.name for entry in store.of_kernel(key())] == [older.file_name]
    assert key().differences(older) == ["settings was older, is none"]
