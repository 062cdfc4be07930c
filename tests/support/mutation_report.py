"""Writes docs/emulator_mutants.md (ten minutes): `python -m tests.support.mutation_report`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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


def mutants_of(subject: Subject, fault: Fault, anatomy: Anatomy) -> list[Mutant]:
    """One for each executed site, then the one with all of them broken."""
    sites: list[int | None] = list(range(len(anatomy.sites(fault))))
    return [Mutant(subject.name, fault.name, site) for site in [*sites, None]] if sites else []


def execute_all(anatomies: Anatomies) -> Iterator[tuple[Mutant, str]]:
    """Every mutant with its outcome."""
    for subject in SUBJECTS:
        for fault in subject.faults:
            sites = anatomies[subject.name].sites(fault)
            for mutant in mutants_of(subject, fault, anatomies[subject.name]):
                struck = sites if mutant.site is None else [sites[mutant.site]]
                yield mutant, noticed(subject, fault, struck)


def report(anatomies: Anatomies, outcomes: Outcomes) -> str:
    """The document; mutants without an outcome are named as not executed."""
    parts, missing = [HEAD], []
    for subject in SUBJECTS:
        parts.append(f"## {subject.name} (`{subject.kernel}`)\n")
        parts.append("| fault | executed of all | noticed | harmless | everywhere |")
        parts.append("|---|---|---|---|---|")
        for fault in subject.faults:
            mutants = mutants_of(subject, fault, anatomies[subject.name])
            missing += [mutant for mutant in mutants if mutant not in outcomes]
            if mutants:
                parts.append(_row(subject, fault, anatomies[subject.name], outcomes))
        parts.append("")
    parts += _missing_part(missing)
    parts.append("## Harmless mutants\n")
    parts.append("| kernel | fault | site | why nothing can go wrong |")
    parts.append("|---|---|---|---|")
    parts += [f"| {h.subject} | {h.fault} | {h.site} | {h.reason} |" for h in HARMLESS]
    return "\n".join(parts) + "\n"


def _row(subject: Subject, fault: Fault, anatomy: Anatomy, outcomes: Outcomes) -> str:
    """A kind's line of the table; raises where an outcome contradicts the harmless ones."""
    *singles, everywhere = mutants_of(subject, fault, anatomy)
    found = {m.site: outcomes[m] for m in singles if m in outcomes}
    harmless = set(harmless_sites(subject, fault))
    unnoticed = {site for site, how in found.items() if not how}
    if unnoticed != harmless & set(found):
        raise ValueError(f"{subject.name}, {fault.name}: {unnoticed} unnoticed, not {harmless}")
    how = outcomes.get(everywhere, "not executed").split(":")[0] or "**not noticed**"
    return (
        f"| {fault.name} | {len(singles)} of {len(fault.sites(anatomy.ptx))} "
        f"| {len(found) - len(unnoticed)} | {len(unnoticed)} | {how} |"
    )


def _missing_part(missing: list[Mutant]) -> list[str]:
    """Says what the tables above lack, if anything."""
    if not missing:
        return []
    kinds: dict[tuple[str, str], list[str]] = {}
    for subject, fault, site in missing:
        place = "everywhere" if site is None else str(site)
        kinds.setdefault((subject, fault), []).append(place)
    rows = [f"| {s} | {f} | {', '.join(places)} |" for (s, f), places in kinds.items()]
    head = ["## Not executed when this page was written\n", "| kernel | fault | sites |"]
    return [*head, "|---|---|---|", *rows, ""]


if __name__ == "__main__":
    dissected = {subject.name: dissect(subject) for subject in SUBJECTS}
    TARGET.write_text(report(dissected, dict(execute_all(dissected))))
