"""No combination of options is missing on a GPU backend, and docs/problem_space.md says so."""

from __future__ import annotations

from itertools import product

import pytest

from tests.support.problem_space import OPTIONS, PAGE, Option, refusals, render

# What kernels do not do is refused by itself.
UNABLE = {"softmax_scale <= 0", "dropout", "ALiBi"}


def choices() -> list[list[Option | None]]:
    """The options of every kind, and none of it."""
    kinds = dict.fromkeys(option.kind for option in OPTIONS if option.name not in UNABLE)
    return [
        [None, *(option for option in OPTIONS if option.kind == kind and option.name != "full")]
        for kind in kinds
    ]


@pytest.mark.parametrize("backend", ["sm90", "sm80", "cpu"])
def test_every_combination_is_computed(backend):
    for chosen in product(*choices()):
        given = [option for option in chosen if option is not None]
        assert refusals(backend, *given) == (), [option.name for option in given]


@pytest.mark.parametrize("backend", ["sm90", "sm80"])
def test_what_is_not_computed_is_refused_with_any_other(backend):
    for option in OPTIONS:
        for unable in (o for o in OPTIONS if o.name in UNABLE and o is not option):
            assert refusals(backend, option, unable)


def test_the_page_is_up_to_date():
    assert PAGE.read_text() == render(), "run python -m tests.support.problem_space"
