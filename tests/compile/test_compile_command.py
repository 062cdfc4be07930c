"""`hopperflash compile` prints what the compiler made of a kernel, and writes it."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

pytest.importorskip("cutlass")

from hopperflash.analysis.kernel_report import report
from hopperflash.cli.main import app
from hopperflash.plan import KernelSpec
from hopperflash.plan.cost import tile_step
from hopperflash.plan.sm90 import SM90
from hopperflash.plan.tiles_sm90 import forward_config, forward_tile
from hopperflash.problem import DType, MaskKind, Signature
from hopperflash.runtime.compile import compile_kernel

pytestmark = pytest.mark.compile

SMALL = ["--head-dim", "64", "--full"]


def invoke(*arguments: str):
    return CliRunner().invoke(app, ["compile", *arguments])


@pytest.mark.xdist_group("bf16-64")
def test_prints_and_writes_a_kernel(tmp_path):
    result = invoke(*SMALL, "--out", str(tmp_path))
    assert result.exit_code == 0, result.stderr
    text = result.stdout
    assert "for sm_90a" in text
    assert "0 B of stack, 0 B spilled" in text
    assert "512 threads" in text
    assert "interior loop at" in text and "boundary loop at" in text
    assert "bound by tensor cores" in text
    assert {path.suffix for path in tmp_path.iterdir()} == {".ptx", ".cubin", ".sass"}
    (sass,) = tmp_path.glob("*.sass")
    assert "HGMMA.64x128x16" in sass.read_text()


@pytest.mark.xdist_group("bf16-64")
def test_json_holds_the_report():
    (kernel,) = json.loads(invoke(*SMALL, "--json").stdout)["kernels"]
    interior = next(step for step in kernel["steps"] if not step["masked"])
    assert sum(interior["pipes"].values()) == interior["instructions"]
    assert interior["tensor_shapes"] == {"64x128x16 SS": 4, "64x64x16 RS": 8}
    assert "other" not in interior["pipes"]
    assert kernel["model"]["units"]["tensor"] == interior["units"]["tensor"]


@pytest.mark.xdist_group("bf16-64")
def test_the_model_says_what_the_code_does():
    """Exactly for what moves and multiplies, and within a tenth for instructions."""
    config = forward_config(forward_tile(64, 64, MaskKind.FULL), 64, 64)
    spec = KernelSpec(SM90.forward, config, Signature(DType.BFLOAT16, MaskKind.FULL), "sm_90a")
    found = report(spec, compile_kernel(spec).artifacts.CUBIN)
    interior = min(found.steps, key=lambda step: step.instructions)
    modelled = tile_step(config, 2)
    for unit in ("tensor", "mufu", "shared", "l2"):
        assert getattr(interior.units, unit) == getattr(modelled.units, unit), unit
    assert interior.instructions == pytest.approx(modelled.instructions, rel=0.1)
    assert not interior.serialised


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arch", "cpu"], "nothing to compile: backend cpu has no kernels"),
        (["--head-dim", "12"], "head_dim of q is 12"),
        (["--direction", "sideways"], "give 'forward' or 'backward'"),
        (["--heads", "3", "--kv-heads", "2"], "not a multiple of the 2 heads of k"),
    ],
)
def test_refusals(arguments, message):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""
