"""`hopperflash explain` prints the plan that the library makes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from hopperflash import plan
from hopperflash.cli.main import app
from hopperflash.problem import AttnOptions
from tests.support.problems import Sizes, problem

ARGUMENTS = ["--batch", "2", "--seqlen", "200", "--seqlen-k", "300", "--heads", "4"]
ARGUMENTS += ["--kv-heads", "2", "--head-dim", "64"]


def explain(*arguments: str):
    return CliRunner().invoke(app, ["explain", *arguments])


@pytest.mark.parametrize("mask", ["--causal", "--full"])
def test_prints_the_explanation_of_the_plan(mask):
    expected = problem(Sizes(), AttnOptions(causal=mask == "--causal"), device="cuda")
    result = explain(*ARGUMENTS, mask)
    assert result.exit_code == 0
    assert result.stdout == plan.explain(plan.make_plan(expected, plan.arch_of("sm_90a"))) + "\n"


def test_direction():
    expected = problem(Sizes(), AttnOptions(causal=True), device="cuda")
    result = explain(*ARGUMENTS, "--causal", "--direction", "backward")
    planned = plan.make_plan(expected, plan.arch_of("sm_90a"), "backward")
    assert result.stdout == plan.explain(planned) + "\n"


def test_json_holds_the_plan():
    data = json.loads(explain(*ARGUMENTS, "--json").stdout)
    assert data["backend"] == "sm90"
    assert data["problem"]["mask"] == {"left": None, "right": 0}
    assert data["steps"]["calls"][0]["grid"] == [2, 4, 2]


def test_sizes_beyond_memory_are_planned():
    result = explain("--seqlen", "10000000", "--heads", "64")
    assert result.exit_code == 0
    assert "10000000 queries" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backend", "sm75"], "unknown backend 'sm75': give one of sm90, sm80, cpu"),
        (["--arch", "sm_70"], "unknown arch 'sm_70'"),
        (["--direction", "sideways"], "give 'forward' or 'backward'"),
        (["--head-dim", "12"], "head_dim of q is 12"),
        (["--heads", "3", "--kv-heads", "2"], "not a multiple of the 2 heads of k"),
        (["--window", "7"], "give LEFT,RIGHT"),
        (["--window", "-5,0"], "window_size left is -5"),
    ],
)
def test_refusals(arguments, message):
    result = explain(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""


def test_loads_neither_torch_nor_cutlass():
    code = (
        "import sys; from hopperflash.cli.main import app\n"
        "try: app(['explain'])\n"
        "except SystemExit: print(*({'torch', 'cutlass'} & set(sys.modules)), file=sys.stderr)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stderr.strip() == ""
    assert "ForwardSm90" in run.stdout
