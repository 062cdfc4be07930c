"""Mask semantics against the inequality they are defined by, pair by pair."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hopperflash.errors import InvalidArgument
from hopperflash.problem import MaskKind, MaskSpec

bounds = st.one_of(st.none(), st.integers(0, 12))
lengths = st.integers(0, 12)


def seen(mask: MaskSpec, i: int, j: int, sq: int, sk: int) -> bool:
    """The definition: i + (sk - sq) - left <= j <= i + (sk - sq) + right."""
    diagonal = i + sk - sq
    left_ok = mask.left is None or diagonal - mask.left <= j
    return left_ok and (mask.right is None or j <= diagonal + mask.right)


@given(bounds, bounds, lengths, lengths)
def test_visibility_is_the_definition(left, right, sq, sk):
    mask = MaskSpec(left, right)
    pairs = rows = 0
    for i in range(sq):
        expected = [j for j in range(sk) if seen(mask, i, j, sq, sk)]
        begin, end = mask.visible_range(i, sq, sk)
        assert list(range(begin, end)) == expected
        assert [j for j in range(sk) if mask.visible(i, j, sq, sk)] == expected
        pairs += len(expected)
        rows += bool(expected)
    assert mask.visible_pairs(sq, sk) == pairs
    assert mask.rows_with_keys(sq, sk) == rows


def test_visible_pairs_is_closed_form():
    length = 1 << 40
    assert MaskSpec(None, 0).visible_pairs(length, length) == length * (length + 1) // 2


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("right", [-1, None, 0, 5])
@pytest.mark.parametrize("left", [-1, None, 0, 7])
def test_canonical_form(left, right, causal):
    mask = MaskSpec.canonical(causal, (left, right))
    unbounded = right in (-1, None)
    assert mask.left == (None if left in (-1, None) else left)
    assert mask.right == (0 if causal else None if unbounded else right)


@pytest.mark.parametrize(
    ("causal", "window", "kind"),
    [
        (False, (-1, -1), MaskKind.FULL),
        (False, (None, None), MaskKind.FULL),
        (True, (-1, -1), MaskKind.CAUSAL),
        (True, (None, 4), MaskKind.CAUSAL),
        (False, (-1, 0), MaskKind.CAUSAL),
        (True, (4, -1), MaskKind.WINDOW),
        (False, (-1, 3), MaskKind.WINDOW),
        (False, (3, -1), MaskKind.WINDOW),
        (False, (0, 0), MaskKind.WINDOW),
    ],
)
def test_kind(causal, window, kind):
    assert MaskSpec.canonical(causal, window).kind is kind


def test_both_bad_bounds_are_reported_with_their_values():
    with pytest.raises(InvalidArgument) as refused:
        MaskSpec.canonical(False, (-2, 1.5))
    left, right = refused.value.reasons
    assert "left is -2" in left and "-1 or None for unbounded" in left
    assert "right is 1.5" in right


@pytest.mark.parametrize("window", [7, None, (1,), (1, 2, 3)])
def test_window_that_is_no_pair(window):
    with pytest.raises(InvalidArgument, match=r"give \(left, right\)"):
        MaskSpec.canonical(False, window)


def test_direct_construction_refuses_negative_bounds():
    with pytest.raises(InvalidArgument, match=r"\(-1, 0\)"):
        MaskSpec(-1, 0)
