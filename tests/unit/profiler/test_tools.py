"""Where profilers are looked for, what stands in their way, and what is made of their words."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hopperflash.profiler import iket, tools
from hopperflash.profiler.tools import Command, ProfilerFailed, run


def script(folder: Path, text: str, name: str = "ncu") -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def nowhere(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(tools.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(tools, "_ROOTS", (f"{tmp_path}/nsight-*",))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)


@pytest.mark.usefixtures("nowhere")
def test_a_tool_is_found_on_the_path_then_beside_python_then_where_it_is_installed(
    tmp_path, monkeypatch
):
    assert tools.find("ncu") is None
    script(tmp_path / "nsight-2025.1", "")
    newest = script(tmp_path / "nsight-2026.3" / "target" / "linux", "")
    assert tools.find("ncu") == newest
    monkeypatch.setattr(tools, "_ROOTS", ())
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    toolkit = script(tmp_path / "cuda" / "bin", "")
    assert tools.find("ncu") == toolkit
    beside = script(tmp_path, "")
    assert tools.find("ncu") == beside
    on_path = script(tmp_path / "bin", "")
    assert tools.find("ncu") == on_path


@pytest.mark.usefixtures("nowhere")
def test_everything_in_the_way_is_told_at_once(tmp_path, monkeypatch):
    parameters = tmp_path / "params"
    parameters.write_text("EnableMSI: 1\nRmProfilingAdminOnly: 1\n")
    status = tmp_path / "status"
    status.write_text("CapInh:\t0000000000000000\nCapEff:\t0000000000000400\n")
    monkeypatch.setattr(tools, "_PARAMETERS", parameters)
    monkeypatch.setattr(tools, "_CAPABILITIES", status)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "7")
    missing, watching, permission = tools.obstacles("ncu", counters=True)
    assert missing.endswith("install nsight-compute (it comes with CUDA toolkits)")
    assert watching.startswith("NSYS_PROFILING_SESSION_ID is set")
    assert permission == tools.PERMISSION
    assert tools.obstacles("ncu", counters=False) == [missing, watching]
    parameters.write_text("RmProfilingAdminOnly: 0\n")
    assert tools.obstacles("ncu", counters=True) == [missing, watching]
    parameters.write_text("RmProfilingAdminOnly: 1\n")
    status.write_text("CapEff:\t000001ffffffffff\n")
    assert tools.obstacles("ncu", counters=True) == [missing, watching]


@pytest.mark.usefixtures("nowhere")
def test_an_older_gpu_is_told_beside_what_else_is_missing(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 6))
    missing, too_old = iket.obstacles()
    assert "pip install nvidia-cutlass-dsl" in missing
    assert "compute capability 8.6" in too_old


def test_without_a_gpu_the_build_of_torch_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for version, why in ((None, "is built without CUDA"), ("13.0", "sees no CUDA device")):
        monkeypatch.setattr(torch.version, "cuda", version)
        assert why in tools.obstacles("ncu", counters=True)[-1]


@pytest.mark.parametrize(
    ("said", "advice"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM - The user", "NVreg_RestrictProfilingToAdminUsers=0"),
        ("Profiling failed because a driver resource was unavailable.", "dcgmi profile --pause"),
        ("Cuda driver is not compatible with Nsight Compute", "update the driver"),
        ("==ERROR== Invalid chip gb202", "take a newer one"),
        ("==ERROR== Failed to find metric regex:^x", "ncu --query-metrics"),
    ],
)
def test_a_failure_ends_with_what_to_do(tmp_path, capfd, said, advice):
    with pytest.raises(ProfilerFailed) as failed:
        run(Command((script(tmp_path, f'echo "{said}"; exit 9'),)))
    assert failed.value.headline == "ncu ended with status 9:"
    assert failed.value.reasons[0] == said
    assert advice in failed.value.reasons[1]
    assert said in capfd.readouterr().err


def test_a_run_that_saw_no_kernel_has_failed(tmp_path):
    with pytest.raises(ProfilerFailed, match="names the backend"):
        run(Command((script(tmp_path, f"echo '==WARNING== {tools.NO_KERNELS}.'"),)))


def test_a_command_has_its_variables_and_is_printed_with_them(tmp_path):
    command = Command((script(tmp_path, 'echo "$LINES_IN, $1"'), "a b"), {"LINES_IN": "x y"})
    assert run(command) == "x y, a b\n"
    assert str(command) == f"LINES_IN='x y' {tmp_path}/ncu 'a b'"
