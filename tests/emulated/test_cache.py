"""Real kernels through the compile cache: compiled once, and run without the compiler."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hopperflash.cli.main import app
from hopperflash.runtime.cache import Store

pytestmark = [pytest.mark.emulated, pytest.mark.xdist_group("cache")]

ROOT = Path(__file__).parents[2]

# Prints whether it compiled, what it imported for that, and the result's bytes.
RUN = """
import json, sys
import torch
import hopperflash
from hopperflash.runtime import compile as compile_module

compiled, original = [], compile_module._compile
def counting(spec):
    compiled.append(spec.ref.name)
    return original(spec)
compile_module._compile = counting

q = torch.randn(1, 70, 1, 64, generator=torch.Generator().manual_seed(0)).half()
with hopperflash.emulate("sm_90a") as run:
    out = hopperflash.flash_attn_func(q, q, q, causal=True)
assert not run.hazards and len(run.launches) == 1
exact = torch.nn.functional.scaled_dot_product_attention(
    *[q.double().transpose(1, 2)] * 3, is_causal=True).transpose(1, 2)
print(json.dumps({
    "compiled": compiled,
    "error": (out - exact).abs().max().item(),
    "bits": out.view(torch.int16).sum().item(),
    "modules": [name for name in sys.modules
                if name.split(".")[0] == "cutlass" or name.startswith("hopperflash.kernels.")],
}))
"""


def start(folder: Path) -> subprocess.Popen[str]:
    variables = {"PATH": "", "HOPPERFLASH_CACHE_DIR": str(folder), "OMP_NUM_THREADS": "1",
                 "OPENBLAS_NUM_THREADS": "1", "HOPPERFLASH_LOG": "info"}  # fmt: skip
    return subprocess.Popen(
        [sys.executable, "-c", RUN], cwd=ROOT, env=variables, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def result(process: subprocess.Popen[str]) -> dict[str, Any]:
    stdout, stderr = process.communicate()
    assert process.returncode == 0, stderr
    found: dict[str, Any] = {**json.loads(stdout), "stderr": stderr}
    assert found["error"] < 2e-3
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache") / "kernels"


@pytest.fixture(scope="module")
def cold(folder: Path) -> list[dict[str, Any]]:
    """Two processes that ask for the same kernel at the same time, with nothing on disk."""
    return [result(process) for process in [start(folder), start(folder)]]


def test_two_cold_processes_compile_once(cold, folder):
    assert sorted(found["compiled"] for found in cold) == [[], ["ForwardSm90"]]
    assert len(Store(folder).entries()) == 1
    assert cold[0]["bits"] == cold[1]["bits"]
    for found in cold:
        assert ("compile ForwardSm90-sm_90a:" in found["stderr"]) == bool(found["compiled"])


def test_a_warm_process_does_not_import_the_compiler(cold, folder):
    warm = result(start(folder))
    assert warm["compiled"] == []
    assert warm["modules"] == []
    assert warm["bits"] == cold[0]["bits"]
    (compiling,) = [found for found in cold if found["compiled"]]
    assert "cutlass" in compiling["modules"], "the check above would not see the compiler"


def test_a_broken_entry_is_compiled_anew(cold, folder):
    (entry,) = Store(folder).entries()
    content = entry.path.read_bytes()
    entry.path.write_bytes(content[: len(content) // 2])
    again = result(start(folder))
    assert again["compiled"] == ["ForwardSm90"]
    assert "is broken" in again["stderr"]
    assert result(start(folder))["compiled"] == []


def test_the_warm_command_fills_the_cache_of_the_run():
    """With the command's own processes; the kernel may be there from other tests."""
    arguments = ["cache", "warm", "--direction", "forward", "--heads", "1", "--head-dim", "64",
                 "--jobs", "1", "--json"]  # fmt: skip
    found = json.loads(CliRunner().invoke(app, arguments).stdout)
    assert found["ok"] is True
    assert {kernel["name"] for kernel in found["kernels"]} == {"ForwardSm90-sm_90a"}
    for kernel in found["kernels"]:
        assert re.match(r"hopperflash_fwd_sm90_bfloat16_d64x64_\w*causal", kernel["entry"])
    again = json.loads(CliRunner().invoke(app, arguments).stdout)
    assert not any(kernel["compiled"] for kernel in again["kernels"])
    verified = CliRunner().invoke(app, ["cache", "verify", "--json"])
    assert json.loads(verified.stdout)["ok"] is True
