"""From a spec to a kernel: seed, cache, compile; once per machine, whatever happens to the disk."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import hopperflash.runtime.compile as compile_module
from hopperflash.errors import CompileError, InvalidArgument
from hopperflash.plan import KernelSpec
from hopperflash.runtime.cache import Store, key_of, obtain, own_store
from hopperflash.runtime.kernel import KernelBinary
from tests.support.cached_kernels import binary, spec_of
from tests.support.problems import Sizes

ROOT = Path(__file__).parents[3]
SPEC, OTHER_SPEC = spec_of(), spec_of(Sizes(head_dim=128))


class Compiler:
    """Counts what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[KernelSpec] = []

    def __call__(self, spec: KernelSpec) -> KernelBinary:
        self.asked.append(spec)
        return binary(b"compiled")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOPPERFLASH_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def compiler() -> Compiler:
    return Compiler()


@pytest.fixture
def messages(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.DEBUG, "hopperflash")
    return caplog


def test_a_kernel_is_compiled_once(compiler, messages):
    assert obtain(SPEC, compiler) == obtain(SPEC, compiler) == binary(b"compiled")
    assert compiler.asked == [SPEC]
    assert "has no such kernel: KernelSpec(" in messages.text
    obtain(OTHER_SPEC, compiler)
    assert compiler.asked == [SPEC, OTHER_SPEC]


def test_the_log_says_what_of_the_installation_is_new(compiler, messages, monkeypatch):
    obtain(SPEC, compiler)
    before = dict(key_of(SPEC).installation)
    after = tuple({**before, "sources": "new"}.items())
    monkeypatch.setattr("hopperflash.runtime.cache.key.installation", lambda: after)
    messages.clear()
    obtain(SPEC, compiler)
    assert len(compiler.asked) == 2
    assert f"sources was {before['sources']}, is new" in messages.text
    assert "cuda was" not in messages.text


def test_a_seed_is_looked_at_first_and_left_alone(compiler, tmp_path, monkeypatch):
    seed = Store(tmp_path / "seed")
    path = seed.write(key_of(SPEC), binary(b"seed"))
    path.chmod(0o400)
    seed.folder.chmod(0o500)
    monkeypatch.setenv("HOPPERFLASH_CACHE_SEED", str(seed.folder))
    assert obtain(SPEC, compiler) == binary(b"seed")
    obtain(OTHER_SPEC, compiler)
    assert compiler.asked == [OTHER_SPEC]
    assert list(seed.folder.iterdir()) == [path]
    seed.folder.chmod(0o700)


def test_a_seed_that_others_may_write_is_refused(compiler, messages, tmp_path, monkeypatch):
    seed = Store(tmp_path / "seed")
    seed.write(key_of(SPEC), binary(b"seed")).chmod(0o666)
    monkeypatch.setenv("HOPPERFLASH_CACHE_SEED", str(seed.folder))
    assert obtain(SPEC, compiler) == binary(b"compiled")
    assert "lets others write to it; it is compiled instead" in messages.text


@pytest.mark.parametrize("damage", ["truncated", "garbage", "empty", "writable"])
def test_an_unusable_entry_is_compiled_anew(compiler, messages, damage):
    obtain(SPEC, compiler)
    (entry,) = own_store().entries()
    content = {"truncated": entry.path.read_bytes()[:100], "garbage": b"x" * 500, "empty": b""}
    if damage == "writable":
        entry.path.chmod(0o666)
    else:
        entry.path.write_bytes(content[damage])
    assert obtain(SPEC, compiler) == binary(b"compiled")
    assert len(compiler.asked) == 2
    assert "it is compiled instead" in messages.text
    obtain(SPEC, compiler)
    assert len(compiler.asked) == 2, "the entry was not replaced"


def test_without_a_cache_everything_compiles(compiler, folder, monkeypatch):
    monkeypatch.setenv("HOPPERFLASH_CACHE", "off")
    obtain(SPEC, compiler)
    obtain(SPEC, compiler)
    assert len(compiler.asked) == 2
    assert not folder.exists()


def test_a_disk_that_cannot_be_written_costs_only_the_cache(compiler, messages, folder):
    folder.write_text("a file where the folder should be")
    assert obtain(SPEC, compiler) == binary(b"compiled")
    assert "is not kept" in messages.text


def test_a_lock_that_others_could_hold_is_not_waited_for(compiler, messages, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    locks = tmp_path / f"hopperflash-locks-{os.geteuid()}"
    locks.mkdir()
    locks.chmod(0o777)
    assert obtain(SPEC, compiler) == binary(b"compiled")
    assert "compiling without a lock" in messages.text
    assert list(locks.iterdir()) == []


def test_the_cache_stays_within_its_bound(compiler, messages, monkeypatch):
    monkeypatch.setenv("HOPPERFLASH_CACHE_SIZE", "0")
    obtain(SPEC, compiler)
    assert own_store().entries() == []
    assert "evicted 1 kernels" in messages.text


@pytest.mark.parametrize(
    ("name", "value"),
    [("CACHE", "maybe"), ("CACHE_SIZE", "1G"), ("CACHE_SIZE", "-1"), ("LOG", "loud")],
)
def test_a_variable_that_says_nothing_known_is_refused(compiler, monkeypatch, name, value):
    from hopperflash.runtime.log import logger

    monkeypatch.setenv(f"HOPPERFLASH_{name}", value)
    logger.cache_clear()
    with pytest.raises(InvalidArgument, match=f"HOPPERFLASH_{name} is '{value}': give"):
        obtain(SPEC, compiler)
    monkeypatch.undo()
    logger.cache_clear()


def test_an_error_of_the_compiler_comes_out_and_frees_the_lock(compiler):
    def broken(spec: KernelSpec) -> KernelBinary:
        raise CompileError("it did not compile")

    with pytest.raises(CompileError):
        obtain(SPEC, broken)
    assert obtain(SPEC, compiler) == binary(b"compiled")


def test_processes_that_ask_together_compile_once(folder, tmp_path):
    compiled = tmp_path / "compiled"
    code = f"""
import time
from tests.support.cached_kernels import binary, spec_of
from hopperflash.runtime.cache import obtain
def compile_slowly(spec):
    with open({str(compiled)!r}, "a") as file:
        file.write("x")
    time.sleep(1.0)
    return binary(b"compiled")
assert obtain(spec_of(), compile_slowly) == binary(b"compiled")
"""
    processes = [subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) for _ in range(4)]
    assert [process.wait() for process in processes] == [0] * 4
    assert compiled.read_text() == "x"


def test_threads_that_ask_together_compile_once(compiler, monkeypatch):
    monkeypatch.setattr(compile_module, "_compile", compiler)
    monkeypatch.setattr(compile_module, "_kernels", {})
    start, kernels = threading.Barrier(8), []

    def ask() -> None:
        start.wait()
        kernels.append(compile_module.compile_kernel(SPEC))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert compiler.asked == [SPEC]
    assert len(kernels) == 8 and len(set(map(id, kernels))) == 1


def test_a_fork_while_a_thread_compiles_does_not_hang(compiler, monkeypatch):
    monkeypatch.setattr(compile_module, "_compile", compiler)
    monkeypatch.setattr(compile_module, "_kernels", {})
    with compile_module._compiler:
        child = os.fork()
        if child == 0:
            threading.Timer(20, os._exit, (1,)).start()
            try:
                os._exit(0 if compile_module.compile_kernel(SPEC).artifacts.PTX else 1)
            finally:
                os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
