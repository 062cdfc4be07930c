"""Environment variables are read in one place, from one table."""

from __future__ import annotations

import pytest

from hopperflash import env


def test_set_unset_and_empty(monkeypatch):
    variable = env.EnvVar("HOPPERFLASH_SAMPLE", "here", "where a sample is")
    monkeypatch.setattr(env, "ENV_VARS", (variable,))
    monkeypatch.delenv(variable.name, raising=False)
    assert env.read(variable.name) == "here"
    monkeypatch.setenv(variable.name, "")
    assert env.read(variable.name) == "here"
    monkeypatch.setenv(variable.name, "elsewhere")
    assert env.read(variable.name) == "elsewhere"


def test_the_table_is_in_order():
    names = [variable.name for variable in env.ENV_VARS]
    assert names == sorted(set(names))
    assert all(name.startswith("HOPPERFLASH_") for name in names)


def test_names_outside_the_table_are_refused():
    with pytest.raises(KeyError, match="not in ENV_VARS"):
        env.read("PATH")
