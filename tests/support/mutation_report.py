"""Writes docs/emulator_mutants.md: `python -m tests.support.mutation_report`."""

from __future__ import annotations

from pathlib import Path

from tests.support.mutants import FAULTS, dissect, noticed
from tests.support.mutation_subjects import HARMLESS, SUBJECTS, harmless_sites

TARGET = Path("docs/emulator_mutants.md")
HEAD = """# Mutants of the project's kernels

Written by `python -m tests.support.mutation_report` and checked by `pytest -m slow` in
`tests/emulated/test_mutants.py`.
Every synchronisation instruction that a check executes is broken, alone and together
with all others of its kind. "noticed" counts single mutants that end with a hazard, an error or a
wrong result in at least one schedule; "everywhere" is what breaking all of them at once ends with.
A mutant that nothing notices is listed below with the reason.
"""


def report() -> str:
    """The document."""
    parts = [HEAD]
    for subject in SUBJECTS:
        anatomy = dissect(subject)
        parts.append(f"## {subject.name} (`{subject.kernel}`)\n")
        parts.append("| fault | executed of all | noticed | harmless | everywhere |")
        parts.append("|---|---|---|---|---|")
        for fault in FAULTS:
            sites = anatomy.sites(fault)
            if not sites:
                continue
            found = [noticed(subject, fault, [site]) for site in sites]
            harmless = harmless_sites(subject, fault)
            assert {i for i, how in enumerate(found) if not how} == set(harmless), fault.name
            how = noticed(subject, fault, sites).split(":")[0]
            parts.append(
                f"| {fault.name} | {len(sites)} of {len(fault.sites(anatomy.ptx))} "
                f"| {len(sites) - len(harmless)} | {len(harmless)} | {how} |"
            )
        parts.append("")
    parts.append("## Harmless mutants\n")
    parts.append("| kernel | fault | site | why nothing can go wrong |")
    parts.append("|---|---|---|---|")
    parts += [f"| {h.subject} | {h.fault} | {h.site} | {h.reason} |" for h in HARMLESS]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    TARGET.write_text(report())
