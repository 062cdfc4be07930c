"""Bytes of the materialised algorithm, counted by hand."""

from __future__ import annotations

from hopperflash.analysis.traffic import materialized_traffic
from tests.support.problems import Sizes, problem


def test_every_matrix_is_read_and_written_once():
    sizes = Sizes(batch=2, seqlen_q=10, seqlen_k=20, heads_q=4, heads_k=2, head_dim=16)
    q, k, scores = 2 * 10 * 4 * 16, 2 * 20 * 2 * 16, 2 * 4 * 10 * 20
    traffic = materialized_traffic(problem(sizes))
    assert traffic.loaded == 2 * (q + 2 * k + 2 * scores)
    assert traffic.stored == 2 * (q + 2 * scores)
    assert traffic.total == traffic.loaded + traffic.stored
