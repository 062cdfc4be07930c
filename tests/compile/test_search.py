"""The search drops what the compiler makes badly."""

from __future__ import annotations

import pytest

from hopperflash.plan import arch_of
from hopperflash.problem import MaskKind
from profiling.candidates import Candidate, enumerate_rows
from profiling.compare_sass import Case
from profiling.search import Question, compile_report, faults_of

pytestmark = pytest.mark.compile


def question(head_dim: int, mask: MaskKind, *, capped: bool) -> Question:
    return Question(Case("forward", head_dim, head_dim, mask), arch_of("sm_90a"), capped)


def candidate(asked: Question, name: str) -> Candidate:
    found = enumerate_rows(asked.case, asked.arch)
    return next(each for each in found if each.name == f"{name}, p_operand registers")


@pytest.mark.parametrize("capped", [False, True])
def test_two_edges_and_a_cap_spill_at_192_queries(capped: bool) -> None:
    asked = question(64, MaskKind.WINDOW, capped=capped)
    spec = asked.spec(candidate(asked, "192x128"), heaviest=True)
    faults = faults_of(compile_report(spec))
    assert any("spilled" in fault for fault in faults) == capped
