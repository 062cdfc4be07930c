"""Environment variables are read in one place, from one table."""

from __future__ import annotations

import pytest

from hopperflash import env


@pytest.mark.parametrize("variable", env.ENV_VARS, ids=lambda variable: variable.name)
def test_set_unset_and_empty(variable, monkeypatch):
    monkeypatch.delenv(variable.name, raising=False)
    assert env.read(variable.name) == variable.default
    monkeypatch.setenv(variable.name, "")
    assert env.read(variable.name) == variable.default
    monkeypatch.setenv(variable.name, "elsewhere")
    assert env.read(variable.name) == "elsewhere"
    assert variable.name.startswith("HOPPERFLASH_")
    assert variable.meaning


def test_names_outside_the_table_are_refused():
    with pytest.raises(KeyError, match="not in ENV_VARS"):
        env.read("PATH")
