"""Process set-up that must precede numpy, the compile cache, the seed, and why GPU tests are
skipped."""

from __future__ import annotations

import gc
import os
import random
import shutil
import sys
import tempfile

import pytest

# The workers of pytest-xdist share the cores: BLAS threads of each would wait for one another, and
# the libraries read these once, when they are first imported.
for _variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Where public kernels lie that no package index has."""
    parser.addoption(
        "--cutlass-examples", metavar="DIR", help="CUTLASS's examples/python/CuTeDSL, to execute"
    )


def pytest_configure(config: pytest.Config) -> None:
    """One compile cache for the run: empty at first, and shared by its workers, who inherit the
    variables."""
    if hasattr(config, "workerinput"):
        return
    for name in [name for name in os.environ if name.startswith("HOPPERFLASH_")]:
        del os.environ[name]
    folder = tempfile.mkdtemp(prefix="hopperflash-tests-")
    os.environ["HOPPERFLASH_CACHE_DIR"] = folder
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips GPU tests where there is no GPU; torch is asked only if there are any."""
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="torch sees no CUDA device"))


def pytest_collection_finish() -> None:
    """What was imported and collected stays until the end, as do decoded kernels: looking through
    them for garbage every few hundred objects took a twentieth of the run."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)


@pytest.fixture(autouse=True)
def _seed() -> None:
    random.seed(0)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(0)
