"""`hopperflash demo` tells a right kernel from a wrong one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from hopperflash.cli.main import app
from hopperflash.emulator import DeadlockError
from hopperflash.runtime.emulation import EmulationSession

pytestmark = pytest.mark.emulated

SMALL = ("--seqlen", "192", "--heads", "1")
BF16_128 = pytest.mark.xdist_group("bf16-128")


def demo(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["demo", *arguments])


@BF16_128
def test_default_demo_is_correct() -> None:
    result = demo()
    assert result.exit_code == 0, result.output
    assert "correct    O and LSE are inside the tolerance, no hazards" in result.stdout
    assert "tiles: 20 visited (MMA FLOPs / FLOPs per tile), as planned; 12 skipped" in result.stdout
    assert "WRONG" not in result.output


@BF16_128
@pytest.mark.parametrize("mask", ["--causal", "--full"])
def test_json_reports_what_was_measured(mask: str) -> None:
    result = demo(*SMALL, mask, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["ok"] is True
    assert found["failures"] == found["hazards"] == []
    for deviation in found["deviations"].values():
        assert 0 < deviation["max_error"] <= deviation["max_bound"]
    assert found["tiles"]["executed"] == found["tiles"]["planned"]
    assert found["useful_flops"] < found["mma_flops"]
    q_bytes = 192 * 128 * 2
    assert found["traffic"]["loaded"] >= 3 * q_bytes
    assert found["traffic"]["stored"] == q_bytes + 192 * 4
    assert found["counters"]["ctas"] == 2


def drop_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = EmulationSession.launch

    def without_scale(self: EmulationSession, kernel: Any, operands: Any) -> None:
        launch(self, kernel, [1.0 if isinstance(x, float) else x for x in operands])

    monkeypatch.setattr(EmulationSession, "launch", without_scale)


@BF16_128
def test_a_kernel_that_drops_the_scale_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    drop_scale(monkeypatch)
    result = demo(*SMALL)
    assert result.exit_code == 1
    assert "WRONG: O is outside the tolerance: max error" in result.stderr
    assert "WRONG: LSE is outside the tolerance: max error" in result.stderr
    assert "OUTSIDE" in result.stdout
    assert "correct" not in result.stdout


@BF16_128
def test_demo_of_the_backward_is_correct() -> None:
    result = demo(*SMALL, "--backward")
    assert result.exit_code == 0, result.output
    assert "correct    O, LSE, dQ, dK and dV are inside the tolerance, no hazards" in result.stdout
    assert "kernel     BackwardSm90 for sm_90a" in result.stdout
    # Tiles of 64 queries x 128 keys: three of the first keys, one of the last.
    assert "backward   tiles: 4 visited (MMA FLOPs / FLOPs per tile), as planned" in result.stdout
    assert "; 2 skipped" in result.stdout


@pytest.mark.xdist_group("sm80-bf16-64")
def test_demo_for_another_arch() -> None:
    sizes = ("--seqlen", "64", "--heads", "1", "--head-dim", "64")
    result = demo("--arch", "sm_80", *sizes, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["ok"] is True and found["hazards"] == []
    assert found["counters"]["wgmma_flops"] == 0 < found["counters"]["mma_flops"]
    assert found["tiles"]["executed"] == found["tiles"]["planned"] == 1


@BF16_128
def test_json_reports_the_backward_by_itself() -> None:
    result = demo(*SMALL, "--full", "--backward", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert list(found["deviations"]) == ["O", "LSE", "dQ", "dK", "dV"]
    for deviation in found["deviations"].values():
        assert 0 < deviation["max_error"] <= deviation["max_bound"]
    backward = found["backward"]
    assert backward["tiles"]["executed"] == backward["tiles"]["planned"] == 3 * 2
    assert found["counters"]["ctas"] == 2  # the forward's alone
    q_bytes, rows = 192 * 128 * 2, 192
    # dK and dV in bf16; dQ in fp32 zeroed, added to for each of two key tiles, and in bf16.
    statistics = 2 * rows * 4
    assert backward["traffic"]["stored"] == 2 * q_bytes + 3 * 2 * q_bytes + q_bytes + statistics
    assert found["seconds"].keys() == {"compile", "forward", "backward", "reference"}


@BF16_128
def test_a_backward_that_forgets_delta_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = EmulationSession.launch

    def without_delta(self: EmulationSession, kernel: Any, operands: Any) -> None:
        launch(self, kernel, operands)
        if len(self.run.launches) == 2:  # after the forward and the preprocess
            operands[5].zero_()

    monkeypatch.setattr(EmulationSession, "launch", without_delta)
    result = demo(*SMALL, "--backward")
    assert result.exit_code == 1
    assert "WRONG: dQ is outside the tolerance: max error" in result.stderr
    assert "WRONG: dK is outside the tolerance: max error" in result.stderr
    assert "dV is outside" not in result.stderr


@BF16_128
def test_a_hazard_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = EmulationSession.launch

    def racy(self: EmulationSession, kernel: Any, operands: Any) -> None:
        launch(self, kernel, operands)
        self.run.hazards.append("a race")

    monkeypatch.setattr(EmulationSession, "launch", racy)
    result = demo(*SMALL)
    assert result.exit_code == 1
    assert result.stderr.endswith("WRONG: 1 hazards, first: a race\n")


@BF16_128
def test_a_kernel_that_hangs_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def stuck(self: EmulationSession, kernel: Any, operands: Any) -> None:
        raise DeadlockError("nobody arrives")

    monkeypatch.setattr(EmulationSession, "launch", stuck)
    result = demo(*SMALL)
    assert result.exit_code == 1
    assert result.stderr.endswith("WRONG: the kernel failed: nobody arrives\n")


@pytest.mark.xdist_group("fp16-64")
def test_tensors_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "qkv.safetensors"
    shapes = {"q": (2, 70, 3, 40), "k": (2, 130, 1, 40), "v": (2, 130, 1, 40)}
    tensors = {name: torch.randn(shape).half() for name, shape in shapes.items()}
    save_file(tensors, path, {"causal": "false"})
    result = demo("--input", str(path), "--json", "--schedule", "eager")
    assert result.exit_code == 0, result.output
    problem = json.loads(result.stdout)["plan"]["problem"]
    assert problem["mask"] == {"left": None, "right": None}
    sizes = ("batch", "seqlen_q", "seqlen_k", "heads_q", "heads_k", "head_dim")
    assert [problem[name] for name in sizes] == [2, 70, 130, 3, 1, 40]


@pytest.mark.xdist_group("fp16-64")
def test_scores_beyond_fp16_give_no_tolerance(tmp_path: Path) -> None:
    path = tmp_path / "qkv.safetensors"
    huge = torch.full((1, 8, 1, 64), 60.0, dtype=torch.float16)
    save_file({"q": huge, "k": huge.clone(), "v": huge.clone()}, path)
    result = demo("--input", str(path))
    assert result.exit_code == 2
    assert "these values give no tolerance" in result.stderr
