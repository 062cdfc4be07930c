"""Seeded faults in the Ampere kernels: a wait, barrier or transpose that is missing everywhere."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

import hopperflash
import hopperflash.runtime.launch as launch_module
from hopperflash.emulator import EmulationError
from tests.support import mutants
from tests.support.gradient_cases import BackwardCase, check_backward

pytestmark = [pytest.mark.emulated, pytest.mark.xdist_group("sm80-bf16-64")]

# Three key tiles of 128 for five query tiles of 64, and two query tiles of 128 for up to five key
# tiles of 64: every ring turns over, and in the backward somebody waits for a turn.
CASE = BackwardCase("faults", seqlen_q=257, seqlen_k=320, causal=True, deterministic=True)

# Lines of PTX that a fault takes away wherever they stand.
FAULTS = {
    "copy-wait": r"^\s*cp\.async\.wait_group",
    "copy-commit": r"^\s*cp\.async\.commit_group",
    "syncthreads": r"^\s*bar\.sync\s+0;",
    "ldmatrix": r"^\s*ldmatrix\.\S*x4\.shared",
    "ldmatrix-trans": r"^\s*ldmatrix\.\S*x4\.trans",
    "copy": r"^\s*(@\S+\s+)?cp\.async\.cg",
}


def _noticed(kernel: str, mutate: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a run with one mutated kernel ends with an error, a hazard or a wrong result."""
    original = launch_module.compile_kernel

    def compile_mutant(spec):
        compiled = original(spec)
        if spec.ref.name != kernel:
            return compiled
        return mutants.MutantKernel(compiled, mutate(compiled.artifacts.PTX))

    monkeypatch.setattr(launch_module, "compile_kernel", compile_mutant)
    for schedule in ("lazy", "random"):
        try:
            with hopperflash.emulate("sm_80", schedule=schedule) as run:
                check_backward(CASE, hopperflash.flash_attn_func)
        except (EmulationError, AssertionError):
            return True
        if run.hazards:
            return True
    return False


@pytest.mark.parametrize("kernel", ["ForwardSm80", "BackwardSm80"])
def test_the_unbroken_kernels_pass(kernel, monkeypatch):
    assert not _noticed(kernel, lambda ptx: ptx, monkeypatch)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kernel", ["ForwardSm80", "BackwardSm80"])
def test_a_fault_everywhere_is_noticed(kernel, fault, monkeypatch):
    pattern = FAULTS[fault]

    def seed(ptx: str) -> str:
        lines = ptx.splitlines()
        broken = ["" if re.search(pattern, line) else line for line in lines]
        assert broken != lines, f"the kernel has no {fault} to break"
        return "\n".join(broken)

    assert _noticed(kernel, seed, monkeypatch)
