"""What a key depends on, and what not."""

from __future__ import annotations

import os
from dataclasses import fields, replace
from pathlib import Path
from typing import get_args

import pytest

import hopperflash
from hopperflash import env
from hopperflash.plan import arch_of, make_plan
from hopperflash.problem import AttnOptions, Direction
from hopperflash.runtime.cache.key import installation, key_of, source_digest
from tests.support.cached_kernels import spec_of
from tests.support.problems import Sizes, packed_problem, problem


@pytest.mark.parametrize("direction", get_args(Direction))
@pytest.mark.parametrize("causal", [False, True])
def test_lengths_batch_and_scale_are_in_no_key(direction, causal):
    """They choose among a few kernels: how many tiles there are decides who computes them."""

    def names(sizes: Sizes, scale: float) -> list[str]:
        options = AttnOptions(causal=causal, softmax_scale=scale)
        plan = make_plan(problem(sizes, options, device="cuda"), arch_of("sm_90a"), direction)
        return [key_of(call.spec).file_name for call in plan.calls]

    some = Sizes(batch=1, seqlen_q=64, seqlen_k=64)
    others = Sizes(batch=3, seqlen_q=499, seqlen_k=8191)
    assert names(some, 0.1) == names(others, 0.2) != []
    many = {tuple(names(Sizes(n, 97 * n, 89 * n), 0.1)) for n in range(1, 60)}
    assert len(many) == (2 if direction == "forward" else 1)


def test_numbers_of_packed_sequences_are_in_no_key():
    plans = [
        make_plan(packed_problem(total, total, sequences, device="cuda"), arch_of("sm_90a"))
        for total, sequences in ((100, 2), (9000, 31))
    ]
    names = [[key_of(call.spec).file_name for call in plan.calls] for plan in plans]
    assert names[0] == names[1] != []


def test_every_field_of_a_spec_is_in_the_key():
    spec = spec_of()
    changed = [
        replace(spec, target="sm_90"),
        replace(spec, dependent=not spec.dependent),
        replace(spec, ref=replace(spec.ref, name="Another")),
        replace(spec, config=replace(spec.config, tile_m=spec.config.tile_m + 64)),
        replace(spec, signature=replace(spec.signature, softcap=not spec.signature.softcap)),
    ]
    assert len(changed) == len(fields(spec))
    names = {key_of(each).file_name for each in (spec, *changed)}
    assert len(names) == 1 + len(changed)


def test_every_part_of_the_installation_is_in_the_key():
    key = key_of(spec_of())
    for number, (part, value) in enumerate(key.installation):
        parts = list(key.installation)
        parts[number] = (part, value + " changed")
        other = replace(key, installation=tuple(parts))
        assert other.kernel_id == key.kernel_id
        assert other.file_name != key.file_name
        assert other.differences(key) == [f"{part} was {value}, is {value} changed"]


def test_the_installation_names_what_compiles():
    parts = dict(installation())
    assert {"sources", "nvidia-cutlass-dsl", "cuda", "apache-tvm-ffi", "python"} <= set(parts)


def test_settings_of_the_compiler_are_in_the_key(monkeypatch):
    assert env.compiler_settings() == ()
    monkeypatch.setenv("CUTE_DSL_LINEINFO", "1")
    installation.cache_clear()
    try:
        assert dict(installation())["settings"] == "CUTE_DSL_LINEINFO=1"
    finally:
        monkeypatch.undo()
        installation.cache_clear()


@pytest.mark.parametrize("layout", ["installed", "checkout"])
def test_sources_of_kernels_and_plans_are_in_the_key(tmp_path, monkeypatch, layout):
    package = tmp_path / "hopperflash"
    kernels = package / "kernels" if layout == "installed" else tmp_path / "kernels"
    counted = [kernels / "sm90" / "fwd.py", package / "plan" / "config.py",
               package / "problem" / "mask.py", package / "runtime" / "compile.py",
               package / "emulator" / "host_export.py"]  # fmt: skip
    other = package / "cli" / "main.py"
    for path in (*counted, other):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x = 1")
    monkeypatch.setattr(hopperflash, "__file__", str(package / "__init__.py"))
    digests = [source_digest()]
    for path in counted:
        path.write_text("x = 2")
        digests.append(source_digest())
    assert len(set(digests)) == len(digests)
    other.write_text("x = 2")
    assert source_digest() == digests[-1]
    counted[0].rename(counted[0].with_name("renamed.py"))
    assert source_digest() != digests[-1]


def test_a_kernel_of_elsewhere_counts_with_its_own_source(tmp_path, monkeypatch):
    module = tmp_path / "own_kernels.py"
    monkeypatch.syspath_prepend(str(tmp_path))
    spec = spec_of()
    spec = replace(spec, ref=replace(spec.ref, module="own_kernels"))
    names = set()
    for text in ("x = 1", "x = 2"):
        module.write_text(text)
        names.add(key_of(spec).file_name)
    assert len(names) == 2


def test_docs_name_every_variable():
    docs = (Path(__file__).parents[3] / "docs" / "cache.md").read_text()
    assert [name for name in env.VARIABLES if f"| `{name}` |" not in docs] == []
    assert os.environ["HOPPERFLASH_CACHE_DIR"]  # of the test run
