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
from tests.support.problems import Sizes, packed_problem, problem

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


def test_window_and_cap():
    options = AttnOptions(window_size=(64, 3), softcap=30.0)
    expected = problem(Sizes(), options, device="cuda")
    result = explain(*ARGUMENTS, "--window", "64,3", "--softcap", "30")
    assert result.stdout == plan.explain(plan.make_plan(expected, plan.arch_of("sm_90a"))) + "\n"


def test_sms_left_free():
    options = AttnOptions(causal=True, sm_margin=20)
    expected = problem(Sizes(), options, device="cuda")
    result = explain(*ARGUMENTS, "--sm-margin", "20")
    assert result.stdout == plan.explain(plan.make_plan(expected, plan.arch_of("sm_90a"))) + "\n"
    assert "sm_margin 20 of 132 SMs leaves 112" in result.stdout


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_packed_sequences(direction):
    sizes = ARGUMENTS[6:]
    result = explain(*sizes, "--seqlens", "5,130,0,64", "--direction", direction)
    expected = packed_problem(199, 199, 4, AttnOptions(causal=True), device="cuda")
    planned = plan.make_plan(expected, plan.arch_of("sm_90a"), direction)
    assert result.stdout == plan.explain(planned) + "\n"


def test_json_holds_the_plan():
    data = json.loads(explain(*ARGUMENTS, "--json").stdout)
    assert data["backend"] == "sm90"
    assert data["problem"]["mask"] == {"left": None, "right": 0}
    assert data["steps"]["calls"][0]["tiles"] == [3, 2, 2]  # both heads of a group in a tile


def test_sizes_beyond_memory_are_planned():
    for mask in ("--causal", "--full"):
        for direction in ("forward", "backward"):
            result = explain("--seqlen", "100000000", mask, "--direction", direction)
            assert result.exit_code == 0
            assert "100000000 queries" in result.stdout
    assert explain("--seqlen", "100000000", "--window", "4096,0").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backend", "sm75"], "unknown backend 'sm75': give one of sm90, sm80, cpu"),
        (["--arch", "sm_70"], "unknown arch 'sm_70'"),
        (["--direction", "sideways"], "give 'forward' or 'backward'"),
        (["--head-dim", "12"], "head_dim of q is 12"),
        (["--heads", "3", "--kv-heads", "2"], "not a multiple of the 2 heads of k"),
        (["--window", "7"], "give LEFT,RIGHT"),
        (["--window", "7,0,0"], "give LEFT,RIGHT"),
        (["--window", "a,0"], "give numbers such as 512,0"),
        (["--window", "-5,0"], "window_size left is -5"),
        (["--softcap", "-1"], "softcap is -1.0"),
        (["--sm-margin", "132"], "sm_margin 132 leaves none of the 132 SMs"),
        (["--seqlens", "5,x"], "give numbers such as 5,130,0"),
        (["--seqlens", "5,-1"], "--seqlens holds -1: give lengths"),
        (["--seqlens", "5", "--seqlen-k", "7"], "leave --seqlen-k away"),
        (["--seqlens", "5", "--batch", "1", "--seqlen", "5"], "leave --batch, --seqlen away"),
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
