"""The kernels whose synchronisation is broken on purpose, one line each, and harmless mutants."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import hopperflash
from tests.support.cases import Case, check_forward
from tests.support.gradient_cases import BackwardCase, check_backward
from tests.support.mutants import Fault, Subject


def _forward(head_dim: int) -> Subject:
    """A causal row block over 5 key blocks in a ring of two stages, or over 27.

    Two of them need a mask, so that the first block and both loops run.
    """

    def check(seqlen_k: int) -> None:
        shape = {"seqlen_q": 128, "head_dim": head_dim, "head_dim_v": head_dim}
        case = Case("mutant", seqlen_k=seqlen_k, causal=True, **shape)
        check_forward(case, hopperflash.flash_attn_func)

    name = f"forward-d{head_dim}"
    return Subject(name, "ForwardSm90", partial(check, 576), partial(check, 3392))


def _backward(head_dim: int) -> Subject:
    """Three or more key tiles that take turns at dQ; the first meets masked and other queries."""
    shape = {"head_dim": head_dim, "head_dim_v": head_dim}
    case = BackwardCase(
        "mutant", seqlen_q=320, seqlen_k=320, causal=True, deterministic=True, **shape
    )

    def check() -> None:
        check_backward(case, hopperflash.flash_attn_func)

    return Subject(f"backward-d{head_dim}", "BackwardSm90", check)


SUBJECTS = (_forward(64), _forward(128), _backward(128))


class Harmless(NamedTuple):
    """A mutant that nothing notices, and why it need not be noticed."""

    subject: str
    fault: str
    site: int
    """Counted among the executed sites of the fault, from 0."""
    reason: str


_FRESH_QUERY_BUFFER = (
    "A CTA computes one row block, so that the Q buffer is filled once: its empty barrier is "
    "waited for once, fresh, and no consumer arrives. The wait passes at once whatever the count."
)
_SAME_FENCE = (
    "The fence before O += P V. The fence before S = Q K^T, issued just before, already orders all "
    "that touched O and P."
)
_FORWARD = (
    ("wgmma-fence", 2, _SAME_FENCE),
    ("wgmma-fence", 4, _SAME_FENCE),
    ("mbarrier-wait", 0, _FRESH_QUERY_BUFFER),
    ("mbarrier-arrive", 5, "The release of the last V block, which nobody waits for."),
    ("mbarrier-init-count", 1, _FRESH_QUERY_BUFFER),
    ("mbarrier-init-fewer", 1, _FRESH_QUERY_BUFFER),
)
HARMLESS = tuple(
    Harmless(subject, *entry) for subject in ("forward-d64", "forward-d128") for entry in _FORWARD
)


def harmless_sites(subject: Subject, fault: Fault) -> dict[int, str]:
    """Site numbers with the reason why breaking them shows nowhere."""
    return {
        h.site: h.reason for h in HARMLESS if (h.subject, h.fault) == (subject.name, fault.name)
    }
