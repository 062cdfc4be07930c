"""The kernels whose synchronisation is broken on purpose, one line each, and harmless mutants."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import hopperflash
from tests.support.cases import Case, check_forward
from tests.support.mutants import Subject


def _forward(head_dim: int) -> Subject:
    """A causal row block over 4 key blocks in a ring of two stages, or over 14."""

    def check(seqlen_k: int) -> None:
        shape = {"seqlen_q": 128, "head_dim": head_dim, "head_dim_v": head_dim}
        case = Case("mutant", seqlen_k=seqlen_k, causal=True, **shape)
        check_forward(case, hopperflash.flash_attn_func)

    name = f"forward-d{head_dim}"
    return Subject(name, "ForwardSm90", partial(check, 512), partial(check, 1792))


SUBJECTS = (_forward(64), _forward(128))


class Harmless(NamedTuple):
    """A mutant that nothing notices, and why it need not be noticed."""

    subject: str
    fault: str
    site: int
    """Counted among the executed sites of the fault, from 0."""
    reason: str


HARMLESS: tuple[Harmless, ...] = ()
