"""What `hopperflash doctor` finds, on machines that are described to it."""

from __future__ import annotations

import json
from enum import IntEnum
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from hopperflash.cli import diagnosis, requirements, trials
from hopperflash.cli.main import app
from hopperflash.runtime import dsl


def doctor(*arguments: str):
    return CliRunner().invoke(app, ["doctor", *arguments])


class Cuda(IntEnum):
    SUCCESS = 0
    NO_DEVICE = 100


class Attribute(IntEnum):
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 0
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 1
    CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 2


def driver_of(*gpus: tuple[str, int, int, int]) -> SimpleNamespace:
    """cuda.bindings.driver on a machine with GPUs of (name, major, minor, SMs)."""
    return SimpleNamespace(
        CUdevice_attribute=Attribute,
        cuInit=lambda flags: (Cuda.SUCCESS if gpus else Cuda.NO_DEVICE,),
        cuDeviceGetCount=lambda: (Cuda.SUCCESS, len(gpus)),
        cuDeviceGet=lambda index: (Cuda.SUCCESS, index),
        cuDeviceGetName=lambda size, gpu: (Cuda.SUCCESS, gpus[gpu][0].encode().ljust(size, b"\0")),
        cuDeviceTotalMem=lambda gpu: (Cuda.SUCCESS, 80 << 30),
        cuDeviceGetAttribute=lambda attribute, gpu: (Cuda.SUCCESS, gpus[gpu][1 + attribute]),
    )


@pytest.fixture
def machine(monkeypatch):
    """Describes GPUs, the driver's CUDA version, torch's, and how many GPUs torch sees."""
    from cuda import bindings

    def describe(*gpus, driver=(13, 4), torch_cuda="13.0", seen=None):
        monkeypatch.setattr(bindings, "driver", driver_of(*gpus), raising=False)
        monkeypatch.setattr(dsl, "driver_version", lambda: driver)
        monkeypatch.setattr(torch.version, "cuda", torch_cuda)
        count = len(gpus) if seen is None else seen
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    return describe


H100, RTX_3090, T4 = ("NVIDIA H100", 9, 0, 132), ("GeForce RTX 3090", 8, 6, 82), ("T4", 7, 5, 40)


def test_a_machine_without_a_gpu():
    result = doctor("--quick")
    assert result.exit_code == 0, result.stderr
    for words in (f"torch                         {torch.__version__}\n", "numpy", "filelock"):
        assert words in result.stdout
    assert "not tried: left out" in result.stdout
    found = json.loads(doctor("--quick", "--json").stdout)
    assert found["cpus"] >= 1
    assert found["abilities"][0]["ok"] is None
    assert found["cuda"]["installed"]
    assert "nvidia-cutlass-dsl-libs-cu12" in found["versions"]


def test_gpus_are_told_with_what_takes_them(machine):
    machine(H100, RTX_3090)
    result = doctor("--quick")
    assert result.exit_code == 0, result.stderr
    for words in (
        "NVIDIA H100, compute capability 9.0, 132 SMs, 80.0 GiB, sm90 backend for sm_90a",
        "GeForce RTX 3090, compute capability 8.6, 82 SMs, 80.0 GiB, sm80 backend for sm_86",
        "cuda:1                        yes: sm80 backend, forward and backward",
        "driver                        CUDA 13.4",
        "torch's CUDA                  13.0",
    ):
        assert words in result.stdout
    gpu = json.loads(doctor("--quick", "--json").stdout)["gpus"][0]
    assert (gpu["multiprocessors"], gpu["memory_bytes"]) == (132, 80 << 30)


def test_a_gpu_that_the_kernels_are_not_made_for_is_no_fault(machine):
    machine(T4)
    result = doctor("--quick")
    assert result.exit_code == 0
    assert "no: compute capability 7.5: the kernels need 8.0 or newer" in result.stdout
    assert "T4, compute capability 7.5, 40 SMs, 80.0 GiB, no backend" in result.stdout


@pytest.mark.parametrize(
    ("facts", "words", "command"),
    [
        (
            {"torch_cuda": None},
            "WRONG: cuda:0: torch is built without CUDA",
            "pip install --force-reinstall torch --index-url",
        ),
        (
            {"torch_cuda": "13.0", "driver": (12, 9)},
            "WRONG: cuda:0: torch is built for CUDA 13, the driver supports CUDA 12",
            "pip install --force-reinstall torch --index-url",
        ),
        ({"torch_cuda": "12.6", "seen": 0}, "WRONG: cuda:0: torch does not see it", ""),
    ],
)
def test_a_gpu_that_torch_cannot_use_is_wrong(machine, facts, words, command):
    machine(H100, **facts)
    result = doctor("--quick")
    assert result.exit_code == 1
    assert words in result.stderr
    assert command in result.stdout


def test_two_generations_of_cuda_are_an_advice_with_its_command(machine, monkeypatch):
    machine(H100, torch_cuda="13.0")
    monkeypatch.setattr(dsl, "installed_libraries", lambda: {12: None})
    result = doctor("--quick")
    assert result.exit_code == 0
    assert "CUDA advice                   kernels are compiled with CUDA 12" in result.stdout
    assert "pip install 'hopperflash[cu13]'" in result.stdout


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda device: ["LSE", "dQ"], "WRONG: cpu tensors: wrong results: LSE, dQ"),
        (lambda device: 1 / 0, "WRONG: cpu tensors: ZeroDivisionError: division by zero"),
    ],
)
def test_results_that_are_wrong_are_wrong(monkeypatch, wrong, words):
    monkeypatch.setattr(trials, "_compile_and_emulate", lambda: "compiled")
    monkeypatch.setattr(trials, "_wrong_results", wrong)
    result = doctor()
    assert result.exit_code == 1
    assert words in result.stderr


def test_results_are_looked_at(monkeypatch):
    from hopperflash import api

    assert trials._wrong_results("cpu") == []
    compute = api.flash_attn_func

    def twice(*operands, **options):
        out, lse = compute(*operands, **options)
        return 2 * out, lse

    monkeypatch.setattr(api, "flash_attn_func", twice)
    assert trials._wrong_results("cpu") == ["O", "dQ", "dK", "dV"]


def test_a_compiler_that_does_not_import_is_wrong(monkeypatch):
    from hopperflash.runtime import compile as compile_module

    def refuse(spec):
        raise RuntimeError("None of the installed toolkit flavors (cu13) are compatible")

    monkeypatch.setattr(compile_module, "_compiled", refuse)
    monkeypatch.setattr(trials, "_wrong_results", lambda device: [])
    result = doctor()
    assert result.exit_code == 1
    assert (
        "WRONG: compile and emulate sm_90a: BackwardPreprocess did not compile for sm_90a:"
        " RuntimeError: None of the installed toolkit flavors (cu13) are compatible\n"
    ) in result.stderr


def test_the_cache_and_the_variables(monkeypatch, tmp_path):
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    for name, value in {
        "CACHE_DIR": str(folder),
        "CACHE_SIZE": "much",
        "CACHE_SEED": str(tmp_path / "nowhere"),
        "CACHEDIR": "/misspelt",
    }.items():
        monkeypatch.setenv(f"HOPPERFLASH_{name}", value)
    monkeypatch.setenv("CUTE_DSL_LINEINFO", "1")
    result = doctor("--quick")
    assert result.exit_code == 0
    for words in (
        f"{folder} is not trusted: its mode drwxrwxrwx lets others write to it",
        "HOPPERFLASH_CACHE_SIZE is 'much': give a number of MiB",
        "nowhere is no folder: HOPPERFLASH_CACHE_SEED names it",
        "HOPPERFLASH_CACHEDIR          /misspelt (nothing reads it)",
        "CUTE_DSL_LINEINFO             1\n",
    ):
        assert words in result.stdout
    folder.chmod(0o700)
    monkeypatch.setenv("HOPPERFLASH_CACHE_SIZE", "7")
    cache = json.loads(doctor("--quick", "--json").stdout)["cache"]
    assert (cache["folder"], cache["entries"], cache["bytes"]) == (str(folder), 0, 0)
    assert cache["limit_bytes"] == 7 << 20
    assert len(cache["trouble"]) == 1
    seed = tmp_path / "seed"
    seed.mkdir()
    seed.chmod(0o770)
    monkeypatch.setenv("HOPPERFLASH_CACHE_SEED", str(seed))
    monkeypatch.setenv("HOPPERFLASH_CACHE_DIR", str(tmp_path / "a file" / "folder"))
    (tmp_path / "a file").touch()
    cache = json.loads(doctor("--quick", "--json").stdout)["cache"]
    assert cache["trouble"] == [
        f"{tmp_path / 'a file'} is no folder",
        f"{seed} is not trusted: its mode drwxrwx--- lets others write to it",
    ]


def test_requirements_that_are_not_met(monkeypatch):
    required = {
        "one": ["two>=2", "three[fast]; python_version > '3'", "four; extra == 'more'", "]["],
        "three": ["five==1.0", "six<2; extra == 'fast'", "seven; extra == 'slow'"],
        "two": [],
    }
    installed = {"one": "1", "two": "1.9", "three": "3", "six": "2.1"}
    monkeypatch.setattr(requirements.metadata, "requires", lambda name: required.get(name))
    monkeypatch.setattr(requirements, "_version", installed.get)
    assert sorted(requirements.unmet(["one", "absent"])) == [
        "one requires two>=2: two is 1.9",
        "three requires five==1.0: five is not installed",
        "three requires six<2: six is 2.1",
    ]


def test_the_disassembler(monkeypatch, tmp_path):
    tool = tmp_path / "nvdisasm"
    tool.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.9, V12.9.88'\n")
    tool.chmod(0o755)
    monkeypatch.setattr(diagnosis, "find_nvdisasm", lambda: tool)
    assert f"nvdisasm                      12.9.88 ({tool})\n" in doctor("--quick").stdout

    def missing():
        raise diagnosis.DisassemblerMissing("nvdisasm not found:")

    monkeypatch.setattr(diagnosis, "find_nvdisasm", missing)
    result = doctor("--quick")
    assert result.exit_code == 0
    assert "nvdisasm                      missing: `hopperflash compile`" in result.stdout
    assert "it comes with the extras `profiling` and `test`" in result.stdout


def test_the_release_of_the_driver(monkeypatch, tmp_path):
    path = tmp_path / "version"
    path.write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  575.51.03  Mon Apr 28\nGCC 12.2\n"
    )
    monkeypatch.setattr(diagnosis, "_DRIVER_FILE", path)
    assert diagnosis._driver_release() == "575.51.03"
    monkeypatch.setattr(diagnosis, "_DRIVER_FILE", tmp_path / "none")
    assert diagnosis._driver_release() is None
