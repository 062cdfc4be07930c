"""Writes docs/emulator_mutants.md (twenty minutes): `python -m tests.support.mutation_report`."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.support.mutants import Anatomy, Fault, Subject, dissect, noticed
from tests.support.mutation_subjects import HARMLESS, SUBJECTS, harmless_sites

TARGET = Path("docs/emulator_mutants.md")
HEAD = """# Mutants of the project's kernels

Written by `python -m tests.support.mutation_report` and checked by `pytest -m slow` in
`tests/emulated/test_mutants.py`, whose default run breaks each kind of synchronisation everywhere
at once, and in the forward kernels at one place.
Every synchronisation instruction that a kernel's check executes (`tests/support/mutants.py`: the
kinds; `tests/support/mutation_subjects.py`: the checks) is broken, alone and together with all
others of its kind. "noticed" counts single mutants that end with a hazard, an error or a wrong
result in a lazy, an eager or one of two random schedules; "everywhere" is what breaking all of them
at once ends with. A mutant that nothing notices is listed below with the reason.
"""


class Mutant(NamedTuple):
    """A subject with a fault at one of its executed sites, counted from 0, or at all (None)."""

    subject: str
    fault: str
    site: int | None


Anatomies = Mapping[str, Anatomy]
Outcomes = Mapping[Mutant, str]
"""How each mutant came to be noticed; "" where it did not."""
_SUBJECTS = {subject.name: subject for subject in SUBJECTS}


def mutants_of(subject: Subject, fault: Fault, anatomy: Anatomy) -> list[Mutant]:
    """One for each executed site, then the one with all of them broken."""
    sites: list[int | None] = list(range(len(anatomy.sites(fault))))
    return [Mutant(subject.name, fault.name, site) for site in [*sites, None]] if sites else []


@cache
def _dissected(subject: str) -> Anatomy:
    return dissect(_SUBJECTS[subject])


def _execute(subject: str, fault: str) -> tuple[str, Anatomy, Outcomes]:
    """A subject, its anatomy and how each mutant of one kind came to be noticed."""
    anatomy = _dissected(subject)
    broken = _SUBJECTS[subject]
    kind = next(kind for kind in broken.faults if kind.name == fault)
    sites = anatomy.sites(kind)
    outcomes = {
        mutant: noticed(broken, kind, sites if mutant.site is None else [sites[mutant.site]])
        for mutant in mutants_of(broken, kind, anatomy)
    }
    return subject, anatomy, outcomes


def execute_all() -> tuple[Anatomies, Outcomes]:
    """Every mutant with its outcome, a kind at a time in as many processes as there are cores."""
    kinds = [(subject.name, fault.name) for subject in SUBJECTS for fault in subject.faults]
    anatomies: dict[str, Anatomy] = {}
    outcomes: dict[Mutant, str] = {}
    with multiprocessing.get_context("spawn").Pool(os.cpu_count(), maxtasksperchild=20) as pool:
        for subject, anatomy, found in pool.starmap(_execute, kinds, chunksize=1):
            anatomies[subject] = anatomy
            outcomes |= found
    return anatomies, outcomes


def contradictions(anatomies: Anatomies, outcomes: Outcomes) -> list[str]:
    """Where the executed mutants and the table of harmless ones differ."""
    found = []
    for subject in SUBJECTS:
        for fault in subject.faults:
            singles = mutants_of(subject, fault, anatomies[subject.name])[:-1]
            unnoticed = {mutant.site for mutant in singles if not outcomes[mutant]}
            harmless = set(harmless_sites(subject, fault))
            if unnoticed != harmless:
                found.append(f"{subject.name}, {fault.name}: {unnoticed} unnoticed, not {harmless}")
    return found


def report(anatomies: Anatomies, outcomes: Outcomes) -> str:
    """The document."""
    parts = [HEAD]
    for subject in SUBJECTS:
        parts.append(f"## {subject.name} (`{subject.kernel}`)\n")
        parts.append("| fault | executed of all | noticed | harmless | everywhere |")
        parts.append("|---|---|---|---|---|")
        for fault in subject.faults:
            if anatomies[subject.name].sites(fault):
                parts.append(_row(subject, fault, anatomies[subject.name], outcomes))
        parts.append("")
    parts.append("## Harmless mutants\n")
    parts.append("| kernel | fault | site | why nothing can go wrong |")
    parts.append("|---|---|---|---|")
    parts += [f"| {h.subject} | {h.fault} | {h.site} | {h.reason} |" for h in HARMLESS]
    return "\n".join(parts) + "\n"


def _row(subject: Subject, fault: Fault, anatomy: Anatomy, outcomes: Outcomes) -> str:
    """A kind's line of the table."""
    *singles, everywhere = mutants_of(subject, fault, anatomy)
    noticed_alone = sum(bool(outcomes[mutant]) for mutant in singles)
    how = outcomes[everywhere].split(":")[0] or "**not noticed**"
    return (
        f"| {fault.name} | {len(singles)} of {len(fault.sites(anatomy.ptx))} "
        f"| {noticed_alone} | {len(singles) - noticed_alone} | {how} |"
    )


def main() -> None:
    """Executes all mutants and writes the page, unless one of them contradicts it."""
    anatomies, outcomes = execute_all()
    if found := contradictions(anatomies, outcomes):
        raise SystemExit("\n".join(found))
    TARGET.write_text(report(anatomies, outcomes))


if __name__ == "__main__":
    main()
