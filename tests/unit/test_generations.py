"""CUDA generations that fit, and what is said of those that do not."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace

import pytest

from hopperflash.errors import CompileError
from hopperflash.runtime import dsl
from hopperflash.runtime.generations import chosen_generation, judge

R525, R575, R580, R590 = (12, 0), (12, 9), (13, 0), (13, 4)
LIBS_12 = "pip install --force-reinstall --no-deps nvidia-cutlass-dsl-libs-cu12==4.8.1"
LIBS_13 = LIBS_12.replace("cu12", "cu13")
TORCH = "pip install --force-reinstall torch --index-url $PYTORCH_INDEX/"
EXTRA = "pip install 'hopperflash[cu13]'"
DROP_13 = "pip uninstall nvidia-cutlass-dsl-libs-cu13"

# (generations of the compiler, torch's, driver): what each finding breaks, says and mends by.
CASES = [
    # Nothing to say.
    ({12}, None, None, []),
    ({12, 13}, None, None, []),
    ({12}, 12, None, []),
    ({12}, 12, R575, []),
    ({12}, 12, R590, []),
    ({12, 13}, 12, R575, []),
    ({12, 13}, 13, None, []),
    ({12, 13}, 13, R590, []),
    ({13}, 13, R590, []),
    # The driver is older than the compiler's libraries.
    ({13}, 12, R575, [("compiler", "the driver supports CUDA 12, nvidia", LIBS_12)]),
    (
        {13},
        13,
        R575,
        [
            ("compiler", "libraries are for CUDA 13 only", LIBS_12),
            ("gpu", "update the driver (580.65 or newer)", TORCH + "cu126"),
        ],
    ),
    ({12}, 12, (11, 8), [("compiler", "update the driver to 525.60 or newer", "")]),
    ({12, 13}, None, (11, 8), [("compiler", "the driver supports CUDA 11", "")]),
    # The libraries are not there.
    (set(), None, None, [("compiler", "has no libraries installed", LIBS_12)]),
    (set(), 13, None, [("compiler", "has no libraries installed", LIBS_13)]),
    (set(), 12, R590, [("compiler", "has no libraries installed", LIBS_12)]),
    # Torch sees no GPU.
    ({12}, None, R575, [("gpu", "torch is built without CUDA", TORCH + "cu126")]),
    ({12}, None, R590, [("gpu", "torch is built without CUDA", TORCH + "cu130")]),
    ({12}, 13, R575, [("gpu", "torch is built for CUDA 13, the driver", TORCH + "cu126")]),
    ({12, 13}, 13, R575, [("gpu", "torch is built for CUDA 13, the driver", TORCH + "cu126")]),
    # Two generations in a process.
    ({12}, 13, R590, [("", "compiled with CUDA 12, torch is built for CUDA 13", EXTRA)]),
    ({12}, 13, None, [("", "compiled with CUDA 12, torch is built for CUDA 13", EXTRA)]),
    ({12, 13}, 12, R590, [("", "compiled with CUDA 13, torch is built for CUDA 12", DROP_13)]),
    ({12, 13}, 12, None, [("", "compiled with CUDA 13, torch is built for CUDA 12", DROP_13)]),
    ({13}, 12, R590, [("", "compiled with CUDA 13", f"{LIBS_12} && {DROP_13}")]),
    # A driver of the right generation, but older.
    ({12}, 12, R525, [("", "CUDA 12.0, the compiler is of CUDA 12.9", "")]),
    ({12, 13}, 13, R580, [("", "CUDA 13.0, the compiler is of CUDA 13.4", "")]),
    (
        {12, 13},
        12,
        R580,
        [("", "compiled with CUDA 13", DROP_13), ("", "CUDA 13.0, the compiler is of", "")],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("libraries", "torch", "driver", "expected"), CASES)
def test_findings(libraries, torch, driver, expected):
    found = judge(frozenset(libraries), torch, driver, "4.8.1")
    assert [(f.breaks, f.mend) for f in found] == [(breaks, mend) for breaks, _, mend in expected]
    for finding, (_, words, _) in zip(found, expected, strict=True):
        assert words in finding.text


@pytest.mark.parametrize("driver", [None, (11, 8), R525, R575, R580, R590, (14, 0)])
def test_every_combination_is_judged(driver):
    """Nothing is compiled exactly where the compiler refuses, and one thing breaks once."""
    for libraries, torch in product((set(), {12}, {13}, {12, 13}), (None, 12, 13)):
        found = judge(frozenset(libraries), torch, driver, "4.8.1")
        chosen = chosen_generation(libraries, driver and driver[0])
        broken = [finding.breaks for finding in found if finding.breaks]
        assert ("compiler" in broken) == (chosen is None)
        assert len(set(broken)) == len(broken)
        assert all(finding.mend or "update" in finding.text for finding in found)


def test_without_the_compiler_all_of_it_is_installed():
    (finding,) = judge(frozenset(), 13, R590, None)
    assert finding.mend == "pip install 'nvidia-cutlass-dsl[cu13]>=4.8.1,<4.9'"
    (finding,) = judge(frozenset(), None, None, None)
    assert finding.mend == "pip install 'nvidia-cutlass-dsl>=4.8.1,<4.9'"


@pytest.fixture
def libraries(monkeypatch, tmp_path):
    """Both generations beside the compiler, and another of an installation behind it."""
    roots = [tmp_path / name for name in ("no compiler", "compiler", "behind")]
    for root, generation in ((1, 12), (1, 13), (2, 14)):
        path = roots[root] / f"cu{generation}" / "lib" / "libcute_dsl_runtime.so"
        path.parent.mkdir(parents=True)
        path.touch()
        (roots[root] / "dsl_packages").mkdir(exist_ok=True)
    spec = SimpleNamespace(submodule_search_locations=list(map(str, roots)))
    monkeypatch.setattr(dsl.importlib.util, "find_spec", lambda name: spec)
    dsl.dsl_runtime.cache_clear()
    yield tmp_path
    dsl.dsl_runtime.cache_clear()


@pytest.mark.parametrize(("driver", "generation"), [(None, 13), (R590, 13), (R575, 12)])
def test_the_newest_that_the_driver_supports_is_taken(libraries, monkeypatch, driver, generation):
    monkeypatch.setattr(dsl, "driver_version", lambda: driver)
    assert dsl.dsl_runtime().cuda_major == generation
    assert dsl.dsl_runtime().path.parts[-3] == f"cu{generation}"


def test_a_driver_that_is_too_old_is_refused_with_the_way_out(libraries, monkeypatch):
    monkeypatch.setattr(dsl, "driver_version", lambda: (11, 8))
    with pytest.raises(CompileError, match=r"update the driver to 525\.60 or newer"):
        dsl.dsl_runtime()
