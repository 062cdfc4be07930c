"""Seeded faults: a missing wait, arrival or fence must not go unnoticed in the lazy schedule."""

from __future__ import annotations

import pytest
import torch

import hopperflash
from hopperflash.emulator import EmulationError
from hopperflash.runtime.compile import compile_kernel
from tests.support import mutants
from tests.support.cases import Case, check_forward

pytestmark = [pytest.mark.emulated, pytest.mark.xdist_group("bf16-128")]

# Two masked and three unmasked key blocks in a ring of two stages: every loop runs, and nearly
# every wait and arrival matters.
CASE = Case("faults", seqlen_q=128, seqlen_k=576, head_dim=128, head_dim_v=128, causal=True)


def _ptx() -> str:
    q, k = torch.empty(1, 128, 1, 128, dtype=torch.bfloat16), torch.empty(1, 576, 1, 128).bfloat16()
    plan = hopperflash.make_plan(q, k, k, causal=True, arch="sm_90a")
    ptx: str = compile_kernel(plan.calls[0].spec).artifacts.PTX
    return ptx


def _noticed(fault: mutants.Fault, site: int) -> bool:
    """Whether a run with the fault ends with an error, a hazard or a wrong result."""
    with mutants.mutated(lambda ptx: fault.seed(ptx, site)):
        try:
            with hopperflash.emulate("sm_90a", schedule="lazy") as run:
                check_forward(CASE, hopperflash.flash_attn_func)
        except (EmulationError, AssertionError):
            return True
    return bool(run.hazards)


def test_the_unbroken_kernel_passes() -> None:
    with hopperflash.emulate("sm_90a", schedule="lazy") as run:
        check_forward(CASE, hopperflash.flash_attn_func)
    assert run.hazards == []


@pytest.mark.parametrize(
    ("fault", "equivalent"),
    [
        (mutants.WGMMA_WAIT, 0),
        # The producer's wait for the Q buffer: a tile fills it once, so it is free by then.
        (mutants.MBARRIER_WAIT, 1),
        # The release of the last V, which nobody waits for.
        (mutants.MBARRIER_ARRIVE, 1),
        (mutants.PROXY_FENCE, 0),
        (mutants.EPILOGUE_BARRIER, 0),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_every_seeded_fault_is_noticed(fault: mutants.Fault, equivalent: int) -> None:
    ptx = _ptx()
    sites = fault.sites(ptx)
    assert sites, f"the kernel has no {fault.name} to break"
    unnoticed = [site for site in sites if not _noticed(fault, site)]
    lines = ptx.splitlines()
    assert len(unnoticed) == equivalent, [lines[site] for site in unnoticed]
