"""Sequences read off masks, against attention over each one's own rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import hopperflash
from hopperflash import UnsupportedProblem
from hopperflash.integrations import hf_rows
from hopperflash.integrations.hf_rows import documents_of, rows_of

HEADS_Q, HEADS_K, HEAD_DIM = 4, 2, 16
OPTIONS = {
    "causal": {"causal": True},
    "window": {"causal": True, "window_size": (2, 0)},
    "both sides": {"window_size": (1, 1)},
    "full": {},
}


def operands(batch: int, queries: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    shapes = ((queries, HEADS_Q), (keys, HEADS_K), (keys, HEADS_K))
    q, k, v = (torch.randn(batch, *shape, HEAD_DIM).half() for shape in shapes)
    return q, k, v


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, options: dict) -> Tensor:
    """Through the rows of the mask, with NaN where it says that nothing counts."""
    k, v = (x.masked_fill((mask == 0)[..., None, None], torch.nan) for x in (k, v))
    rows_q, rows_k = rows_of(mask, q.shape[1], bool(options))
    out = hopperflash.flash_attn_varlen_func(
        rows_q.taken(q),
        rows_k.taken(k),
        rows_k.taken(v),
        rows_q.cu_seqlens,
        rows_k.cu_seqlens,
        q.shape[1],
        k.shape[1],
        seqused_q=rows_q.seqused,
        seqused_k=rows_k.seqused,
        **options,
    )
    return rows_q.put_back(out, *q.shape[:2])


def expected(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, options: dict) -> Tensor:
    """Document by document; the queries are the last tokens of the mask."""
    out = torch.zeros_like(q)
    queries, keys = q.shape[1], k.shape[1]
    several = any(len({*row.tolist()} - {0}) > 1 for row in mask.int())
    for b, row in enumerate(mask.int()):
        for document in {*row.tolist()} - {0} or {1}:
            seen = (row == document).nonzero().flatten()
            asking = torch.arange(queries)
            if options:
                asking = seen[seen >= keys - queries] - (keys - queries)
            elif several:
                asking = seen
            out[b, asking] = hopperflash.flash_attn_func(
                q[b : b + 1, asking], k[b : b + 1, seen], v[b : b + 1, seen], **options
            )
    return out


MASKS = {
    "padded right": [[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1], [1, 0, 0, 0, 0, 0]],
    "padded left": [[0, 0, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1]],
    "padded on both sides": [[0, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0]],
    "a row of padding": [[0] * 6, [1] * 6, [0] * 6],
    "nothing but padding": [[0] * 6] * 3,
    "holes": [[1, 1, 0, 0, 1, 1], [1, 0, 1, 0, 1, 0], [0, 0, 1, 1, 1, 1]],
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("queries", [6, 4, 1])
@pytest.mark.parametrize("name", MASKS)
def test_padding(name: str, queries: int, options: str) -> None:
    mask = torch.tensor(MASKS[name]).bool()
    given = operands(3, queries, 6)
    found = attention(*given, mask, OPTIONS[options])
    torch.testing.assert_close(found, expected(*given, mask, OPTIONS[options]))


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_documents(data: st.DataObject) -> None:
    """Documents of any lengths with padding anywhere, also in the middle of one."""
    batch, keys = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 9))
    row = st.lists(st.integers(0, 3), min_size=keys, max_size=keys)
    steps = torch.tensor(data.draw(st.lists(row, min_size=batch, max_size=batch)))
    documents = (1 + (steps == 3).cumsum(1)) * (steps != 2)  # a 3 begins one, a 2 is padding
    options = OPTIONS[data.draw(st.sampled_from(sorted(OPTIONS)))]
    given = operands(batch, keys, keys)
    found = attention(*given, documents, options)
    counted = documents != 0
    want = expected(*given, documents, options)
    torch.testing.assert_close(found[counted], want[counted])
    if options:
        assert found[~counted].count_nonzero() == 0


def test_a_run_is_read_in_place() -> None:
    """Padding at the ends costs no copy."""
    q, k, _ = operands(3, 6, 6)
    for name in ("padded right", "padded left", "padded on both sides"):
        rows_q, rows_k = rows_of(torch.tensor(MASKS[name]).bool(), 6, True)
        assert rows_q.taken(q).data_ptr() == q.data_ptr()
        assert rows_k.taken(k).data_ptr() == k.data_ptr()
    packed = torch.tensor([[1, 1, 2, 2, 2, 3]] * 3)
    assert rows_of(packed, 6, True)[0].taken(q).data_ptr() == q.data_ptr()


def test_positions() -> None:
    assert documents_of(torch.arange(5)[None], 2) is None
    assert documents_of(torch.arange(5)[None] + 7, 1) is None
    assert documents_of(torch.tensor([[0, 1, 4, 5]]), 1) is None
    found = documents_of(torch.tensor([[0, 1, 2, 0, 1, 0]]), 2)
    assert found is not None
    assert found.tolist() == [[1, 1, 1, 2, 2, 3]] * 2
    two = documents_of(torch.tensor([[3, 4, 5, 3], [3, 4, 5, 6]]), 2)
    assert two is not None
    assert two.tolist() == [[1, 1, 1, 2], [1, 1, 1, 1]]


def test_a_mask_is_read_once_until_it_changes() -> None:
    mask = torch.tensor(MASKS["padded right"]).bool()
    rows = rows_of(mask, 6, True)
    assert rows_of(mask, 6, True) is rows
    assert rows_of(mask, 6, False) is not rows
    mask[0, 3] = True
    _, changed = rows_of(mask, 6, True)
    assert changed.seqused is not None
    assert changed.seqused.tolist() == [4, 6, 1]
    with torch.inference_mode():
        assert rows_of(mask[:1].clone(), 6, True)[0].cu_seqlens.tolist() == [0, 6]


def test_nothing_is_kept_of_a_mask_that_is_gone() -> None:
    before = len(hf_rows._READ)
    mask = torch.tensor(MASKS["padded right"]).bool()
    rows_of(mask, 6, True)
    assert len(hf_rows._READ) == before + 1
    del mask
    assert len(hf_rows._READ) == before


def test_refusals() -> None:
    with pytest.raises(UnsupportedProblem, match="7 queries, but a mask of 6 tokens"):
        rows_of(torch.ones(1, 6).bool(), 7, True)
    with pytest.raises(UnsupportedProblem, match="documents of 4 tokens, but 2 queries"):
        rows_of(torch.tensor([[1, 1, 2, 2]]), 2, True)
