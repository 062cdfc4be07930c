"""Public kernels, unchanged, in the emulator: flash-attn-4 forward and backward for sm_90.

They come with `pip install hopperflash[conformance]`; without it these tests are skipped. Each runs
in a process of its own, because the package must find a "GPU" when it is imported.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

MISSING = [name for name in ("flash_attn", "triton") if importlib.util.find_spec(name) is None]

pytestmark = [
    pytest.mark.emulated,
    pytest.mark.slow,
    pytest.mark.skipif(
        bool(MISSING),
        reason=f"{', '.join(MISSING)} not installed: pip install 'hopperflash[conformance]'",
    ),
]

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("schedule", ["eager", "lazy"])
@pytest.mark.parametrize(("head_dim", "causal"), [(64, True), (128, False), (128, True)])
def test_flash_attention_4(head_dim: int, causal: bool, schedule: str, tmp_path: Path) -> None:
    environment = {
        **os.environ, "FLASH_ATTENTION_ARCH": "sm_90", "CUTE_DSL_ARCH": "sm_90a",
        "CUTE_DSL_KEEP": "ptx", "CUTE_DSL_DUMP_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(
            [str(ROOT), os.environ.get("PYTHONPATH", "")]
        ),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.flash_attention_4", schedule, str(head_dim),
         str(int(causal))], env=environment, text=True, capture_output=True, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
