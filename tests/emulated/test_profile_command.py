"""`hopperflash profile ncu --emulated`: counted bytes of each kernel beside the model's."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from hopperflash.cli.main import app

pytestmark = [pytest.mark.emulated, pytest.mark.xdist_group("bf16-64")]


@pytest.mark.parametrize(("arch", "by_tma"), [("sm_90a", True), ("sm_80", False)])
def test_counted_bytes_are_the_models(arch: str, by_tma: bool) -> None:
    sizes = ("--seqlen", "200", "--heads", "2", "--head-dim", "64")
    result = CliRunner().invoke(
        app, ["profile", "ncu", "--emulated", "--arch", arch, *sizes, "--json"]
    )
    assert result.exit_code == 0, result.output
    kernels = json.loads(result.stdout)["kernels"]
    assert ["fwd" in kernel["name"] for kernel in kernels] == [True, False, False, False]
    for kernel in kernels:
        loaded, tma, stored, _ = kernel["bytes"]
        assert (loaded["ratio"], stored["ratio"]) == (1, 1)
        assert kernel["launches"] == 1
        main = "_sm" in kernel["name"]
        assert tma["counted"] == (loaded["counted"] if main and by_tma else 0)
