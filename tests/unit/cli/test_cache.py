"""`hopperflash cache` over entries that no compiler made, and what `warm` would compile."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hopperflash.cli.main import app
from hopperflash.cli.warm import WarmOptions, kernels_of
from hopperflash.errors import InvalidArgument
from hopperflash.plan import arch_of, make_plan
from hopperflash.plan.config import Scheduler
from hopperflash.problem import AttnOptions
from hopperflash.runtime.cache import Store
from tests.support.cached_kernels import ENTRY, binary, key
from tests.support.problems import Sizes, problem


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("HOPPERFLASH_CACHE_DIR", str(tmp_path / "cache"))
    return Store(tmp_path / "cache")


@pytest.fixture
def three(store: Store) -> dict[str, Path]:
    """A kernel of this installation, one of another, and a broken one."""
    stale = replace(key(), installation=(*key().installation[:-1], ("settings", "older")))
    paths = {
        "current": store.write(key(), binary()),
        "stale": store.write(stale, binary()),
        "broken": store.write(key(head_dim=128), binary()),
    }
    paths["broken"].write_bytes(b"broken")
    return paths


def cache(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["cache", *arguments])


def test_lists_an_empty_cache(store):
    result = cache("list")
    assert result.exit_code == 0
    assert result.stdout == f"0 kernels, 0.0 MiB of 1024 MiB in {store.folder}\n"


def test_lists_entries_and_their_state(three):
    lines = cache("list").stdout.splitlines()
    assert len(lines) == 4
    for state in ("current", "of another installation", "is broken: the checksum"):
        assert sum(state in line for line in lines) == 1
    found = json.loads(cache("list", "--json").stdout)
    assert sum(f"ForwardSm90-sm_90a  {ENTRY}  " in line for line in lines) == 2
    by_path = {entry["path"]: entry for entry in found["entries"]}
    assert set(by_path) == {str(path) for path in three.values()}
    assert by_path[str(three["current"])]["current"] is True
    assert by_path[str(three["current"])]["spec"] == key().spec
    assert by_path[str(three["stale"])]["current"] is False
    assert by_path[str(three["stale"])]["installation"]["settings"] == "older"
    assert "checksum" in by_path[str(three["broken"])]["problem"]
    assert found["bytes"] == sum(path.stat().st_size for path in three.values())


def test_verify_names_what_is_broken_and_what_does_not_link(three):
    result = cache("verify", "--json")
    assert result.exit_code == 1
    problems = {entry["path"]: entry["problem"] for entry in json.loads(result.stdout)["broken"]}
    assert "is broken" in problems[str(three["broken"])]
    assert "does not link" in problems[str(three["current"])]
    assert cache("verify").exit_code == 1


def test_verify_looks_into_the_seed(three, tmp_path, monkeypatch):
    cache("clear")
    assert cache("verify").exit_code == 0
    seed = Store(tmp_path / "seed")
    path = seed.write(key(), binary())
    path.write_bytes(b"broken")
    monkeypatch.setenv("HOPPERFLASH_CACHE_SEED", str(seed.folder))
    result = cache("verify")
    assert result.exit_code == 1
    assert str(path) in result.stdout


def test_clear_deletes_everything(store, three):
    result = cache("clear", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["deleted"] == 3
    assert list(store.folder.iterdir()) == []


def test_clear_stale_keeps_what_this_installation_uses(store, three):
    assert "deleted 2 kernels" in cache("clear", "--stale").stdout
    assert [entry.path for entry in store.entries()] == [three["current"]]


def test_warm_compiles_the_kernels_of_the_plans():
    options = WarmOptions(dtype="bf16", head_dim="64,128", mask="causal,full", heads=4, kv_heads=2)
    expected = {
        call.spec
        for head_dim in (64, 128)
        for causal in (True, False)
        for direction in ("forward", "backward")
        for sizes in (
            Sizes(1, 1, 1, 4, 2),
            Sizes(1, 512, 512, 4, 2),
            Sizes(1, 8192, 8192, 4, 2),
            Sizes(64, 2048, 2048, 4, 2),
        )
        for call in make_plan(
            problem(replace(sizes, head_dim=head_dim), AttnOptions(causal=causal)),
            arch_of("sm_90a"),
            direction,
        ).calls
    }
    assert set(kernels_of(options)) == expected
    assert len(kernels_of(options)) == len(expected)


def test_warm_knows_packed_sequences_and_windows():
    dense = kernels_of(WarmOptions(direction="forward", window="512,0", softcap=20.0))
    packed = [
        spec
        for spec in kernels_of(WarmOptions(direction="forward", packed=True))
        if spec.signature.packed
    ]
    assert all(spec.signature.softcap and not spec.signature.packed for spec in dense)
    schedulers = [Scheduler.SINGLE, Scheduler.DYNAMIC]
    assert [spec.config.scheduler for spec in dense] == schedulers
    assert [spec.config.scheduler for spec in packed] == schedulers
    assert {spec.ref for spec in packed} == {spec.ref for spec in dense}


def test_warm_knows_grids_that_leave_sms_free():
    specs = kernels_of(WarmOptions(direction="forward", sm_margin=16))
    assert {spec.config.scheduler for spec in specs} == {Scheduler.DYNAMIC}


def test_warm_refuses_with_every_reason():
    with pytest.raises(InvalidArgument) as refused:
        kernels_of(WarmOptions(dtype="fp32,bf16", head_dim="64,wide", mask="triangle"))
    assert len(refused.value.reasons) == 3
    with pytest.raises(InvalidArgument, match="65") as refused:
        kernels_of(WarmOptions(head_dim="65,264", arch="sm_90a"))
    assert any("264" in reason for reason in refused.value.reasons)
    assert cache("warm", "--head-dim", "65").exit_code == 2


def test_warm_refuses_where_nothing_is_kept(monkeypatch):
    monkeypatch.setenv("HOPPERFLASH_CACHE", "off")
    result = cache("warm")
    assert result.exit_code == 2
    assert "HOPPERFLASH_CACHE is off" in result.stderr
