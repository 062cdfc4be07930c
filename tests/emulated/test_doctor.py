"""`hopperflash doctor` on this machine, with everything that it tries."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from hopperflash.cli import trials
from hopperflash.cli.main import app
from hopperflash.emulator import EmulationError
from hopperflash.runtime import compile as compile_module
from hopperflash.runtime import emulation

pytestmark = [pytest.mark.emulated, pytest.mark.xdist_group("bf16-64")]


def test_everything_works_here():
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["versions"]["torch"] == torch.__version__
    abilities = {ability["name"]: ability for ability in found["abilities"]}
    assert all(ability["ok"] for ability in abilities.values())
    compiled = abilities["compile and emulate sm_90a"]["detail"]
    assert compiled.startswith("BackwardPreprocess compiled in ")
    assert abilities["cpu tensors"]["detail"].endswith("results checked")
    assert abilities["emulated sm_90a"]["detail"] == "sm90 backend, forward and backward"


def test_the_kernel_is_compiled_and_not_kept():
    before = dict(compile_module._kernels)
    assert trials.compiler(tried=True).ok
    assert compile_module._kernels == before


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (lambda *_: None, "the emulated kernel computed [nan, nan"),
        (EmulationError("no such instruction"), "EmulationError: no such instruction"),
    ],
)
def test_an_emulator_that_fails_is_wrong(monkeypatch, fault, words):
    def launch(*arguments):
        if isinstance(fault, Exception):
            raise fault

    monkeypatch.setattr(emulation.EmulationSession, "launch", launch)
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "WRONG: compile and emulate sm_90a" in result.stderr
    assert words in result.stderr
