"""What `hopperflash profile ncu --lineinfo` sets makes kernels with line numbers, cached apart."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hopperflash import env

pytestmark = pytest.mark.compile

ROOT = Path(__file__).parents[2]
CODE = """
from hopperflash.cli.explain import ExplainOptions, plan_of
from hopperflash.runtime.cache.key import key_of
from hopperflash.runtime.compile import compile_anew

(spec, *_) = (call.spec for call in plan_of(ExplainOptions(direction="backward")).calls)
print("bwd_preprocess.py" in compile_anew(spec).artifacts.PTX, key_of(spec).file_name)
"""


def compiled(**settings: str) -> list[str]:
    """Whether the PTX names its source, and the name of the cache entry."""
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        cwd=ROOT,
        env=env.of_child(settings),
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


def test_line_numbers_are_in_the_kernel_and_in_its_key() -> None:
    plain, lines = compiled(), compiled(**{env.LINE_INFO: "1"})
    assert (plain[0], lines[0]) == ("False", "True")
    assert plain[1] != lines[1]
