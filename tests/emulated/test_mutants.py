"""Synchronisation broken on purpose, instruction by instruction: nothing may go unnoticed.

The default run breaks each kind of synchronisation everywhere at once, and in the forward kernels
at one place; the slow one breaks every single instruction. `docs/emulator_mutants.md` lists the
harmless ones.
"""

from __future__ import annotations

from functools import cache

import pytest

from tests.support.mutants import FAULTS, Anatomy, Fault, Subject, dissect, noticed
from tests.support.mutation_subjects import SUBJECTS, harmless_sites

pytestmark = [pytest.mark.emulated, pytest.mark.xdist_group("mutants")]

PAIRS = [(subject, fault) for subject in SUBJECTS for fault in subject.faults]
# A backward takes seconds where a forward takes tenths.
QUICK_PAIRS = [pair for pair in PAIRS if pair[0].name.startswith("forward")]


def by_fault(pairs: list[tuple[Subject, Fault]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("subject", "fault"), pairs, ids=lambda part: part.name)


@cache
def anatomy(subject: Subject) -> Anatomy:
    return dissect(subject)


def _sites(subject: Subject, fault: Fault) -> list[int]:
    sites = anatomy(subject).sites(fault)
    if not sites:
        pytest.skip(f"{subject.name} executes nothing that {fault.name} could break")
    return sites


@by_fault(PAIRS)
def test_a_fault_everywhere_is_noticed(subject: Subject, fault: Fault) -> None:
    assert noticed(subject, fault, _sites(subject, fault))


@by_fault(QUICK_PAIRS)
def test_a_fault_at_one_place_is_noticed(subject: Subject, fault: Fault) -> None:
    sites = _sites(subject, fault)
    harmful = set(range(len(sites))) - set(harmless_sites(subject, fault))
    if len(sites) == 1 or not harmful:
        pytest.skip(f"{subject.name}: one place is all of them, or harmless by itself")
    assert noticed(subject, fault, [sites[min(harmful)]])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@by_fault(PAIRS)
def test_every_fault_is_noticed_or_explained(subject: Subject, fault: Fault) -> None:
    sites = _sites(subject, fault)
    unnoticed = {i for i, site in enumerate(sites) if not noticed(subject, fault, [site])}
    lines = anatomy(subject).ptx.splitlines()
    assert unnoticed == set(harmless_sites(subject, fault)), [lines[sites[i]] for i in unnoticed]


def test_paired_subjects_are_pairs() -> None:
    paired = [subject for subject in SUBJECTS if "paired" in subject.name]
    assert len(paired) == 2
    for subject in paired:
        assert "barrier.cluster.arrive" in anatomy(subject).ptx


def test_every_fault_kind_strikes_some_kernel() -> None:
    """The kinds that no kernel here has are known, so that none is forgotten by a bad pattern."""
    struck = {f.name for f in FAULTS for s in SUBJECTS if f.sites(anatomy(s).ptx)}
    assert {f.name for f in FAULTS} - struck == {"bulk-wait-for-reads"}
