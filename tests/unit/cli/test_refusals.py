"""What the demo refuses before anything runs."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from hopperflash.cli import options
from hopperflash.cli.demo_reference import Cotangents
from hopperflash.cli.inputs import random_inputs
from hopperflash.cli.main import app
from tests.support.problems import problem


def run(*arguments: str):
    return CliRunner().invoke(app, [*arguments])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arch", "sm_75"], "unknown arch 'sm_75'"),
        (["--arch", "cpu"], "arch 'cpu' is no GPU"),
        (["--schedule", "hasty"], "give one of eager, lazy, random"),
        (["--head-dim", "12"], "head_dim of q is 12"),
        (["--input", "x", "--seqlen", "5", "--kv-heads", "1"], "leave --seqlen, --kv-heads away"),
        (["--input", "/nowhere.safetensors"], "cannot read /nowhere.safetensors"),
    ],
)
def test_demo_refuses_with_one_message(arguments, message):
    result = run("demo", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("command", ["demo", "emulate"])
@pytest.mark.parametrize("seed", ["9223372036854775807", "-1", "123456789012345678901234567890"])
def test_seeds_that_no_generator_takes_are_usage_errors(command, seed):
    result = run(command, "--seed", seed)
    assert result.exit_code == 2
    assert "Invalid value for '--seed'" in result.stderr
    assert "Traceback" not in result.stderr


def test_the_largest_seed_is_taken():
    assert Cotangents.random(problem(), options.SEED_MAX)
    assert random_inputs(options.Sizes.of(options.SizeOptions(seqlen=1)), options.SEED_MAX)


def test_demo_refuses_tensors_that_make_no_problem(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"q": torch.zeros(1, 8, 2, 8), "k": torch.zeros(3), "v": torch.zeros(3)}, path)
    result = run("demo", "--input", str(path))
    assert result.exit_code == 2
    assert "k has shape (3,)" in result.stderr
    assert "q is float32: cast to bfloat16 or float16" in result.stderr


def test_demo_has_nothing_to_run_for_an_empty_problem(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({name: torch.zeros(1, 0, 2, 8, dtype=torch.float16) for name in "qkv"}, path)
    result = run("demo", "--input", str(path))
    assert result.exit_code == 2
    assert "nothing to run:" in result.stderr


def test_demo_refuses_values_that_have_no_reference(tmp_path):
    path = tmp_path / "x.safetensors"
    tensors = {name: torch.ones(1, 8, 2, 8, dtype=torch.float16) for name in "qkv"}
    tensors["k"][0, 3, 1, 2] = torch.nan
    save_file(tensors, path)
    result = run("demo", "--input", str(path))
    assert result.exit_code == 2
    assert "cannot be compared with fp64:\n- k holds NaN or Inf" in result.stderr
