"""The kernels whose synchronisation is broken on purpose, one line each, and harmless mutants."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import hopperflash
from tests.support.cases import Case, check_forward
from tests.support.gradient_cases import BackwardCase, check_backward
from tests.support.mutants import FAULTS, Fault, Subject
from tests.support.pairs import pairs_wherever_they_can_be


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


_BETWEEN_CTAS = tuple(
    fault
    for fault in FAULTS
    if fault.name in {
        "mbarrier-wait", "mbarrier-arrive", "expect-tx-half", "expect-tx-more",
        "mbarrier-init-count", "mbarrier-init-fewer", "mbarrier-init-fence",
        "cluster-arrive", "cluster-wait",
    }
)  # fmt: skip
"""What hands memory on between CTAs."""


_BETWEEN_WARPGROUPS = tuple(
    fault
    for fault in FAULTS
    if fault.name in {
        "wgmma-wait", "wgmma-wait-for-older", "wgmma-fence", "wgmma-commit", "proxy-fence",
        "named-barrier-sync",
    }
)  # fmt: skip
"""What orders GEMMs and what warpgroups hand each other."""


def _paired_backward() -> Subject:
    """Two pairs of key tiles that load queries for each other, two blocks of each head of a group,
    of which the second tile of the second pair passes over one."""

    def check(heads_q: int) -> None:
        case = BackwardCase(
            "mutant",
            seqlen_q=128,
            seqlen_k=256,
            heads_q=heads_q,
            head_dim=256,
            head_dim_v=256,
            causal=True,
        )
        with pairs_wherever_they_can_be():
            check_backward(case, hopperflash.flash_attn_func)

    name = "backward-paired-d256"
    return Subject(
        name, "BackwardSm90", partial(check, 3), partial(check, 10), faults=_BETWEEN_CTAS
    )


def _paired() -> Subject:
    """Two causal row blocks whose CTAs load keys for each other, 9 blocks or 41, the last of which
    only one of them sees."""

    def check(seqlen_k: int) -> None:
        shape = {"seqlen_q": 256, "head_dim": 128, "head_dim_v": 128}
        case = Case("mutant", seqlen_k=seqlen_k, causal=True, **shape)
        with pairs_wherever_they_can_be():
            check_forward(case, hopperflash.flash_attn_func)

    return Subject(
        "forward-paired-d128", "ForwardSm90", partial(check, 1100), partial(check, 5196),
        faults=_BETWEEN_CTAS,
    )  # fmt: skip


def _backward(head_dim: int) -> Subject:
    """Three key tiles that take turns at dQ, the first with masked and other queries of five tiles;
    or, for ten heads, two key tiles, one with masked queries alone and one without.

    The lengths differ so that a masked tile of queries waits for another key tile too. A ring whose
    phases complete an arrival of eight too early drifts, and the eighth use of a stage waits for a
    phase that has passed twice.
    """

    def check(seqlen_q: int, seqlen_k: int, heads_q: int) -> None:
        case = BackwardCase(
            "mutant",
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            heads_q=heads_q,
            head_dim=head_dim,
            head_dim_v=head_dim,
            causal=True,
            deterministic=True,
        )
        check_backward(case, hopperflash.flash_attn_func)

    name = f"backward-d{head_dim}"
    return Subject(
        name, "BackwardSm90", partial(check, 320, 352, 1), partial(check, 128, 256, 10),
        hazards="ordered",
    )  # fmt: skip


def _query_rows() -> Subject:
    """Key tiles whose P and dS go through shared memory, one for its own warpgroup and one for
    both; three query tiles, of which two see all keys of the first of them."""

    def check() -> None:
        shape = {"seqlen_q": 192, "seqlen_k": 224, "head_dim": 192, "head_dim_v": 192}
        case = BackwardCase("mutant", causal=True, **shape)
        check_backward(case, hopperflash.flash_attn_func)

    return Subject("backward-d192", "BackwardSm90", check, faults=_BETWEEN_WARPGROUPS)


def _attention_of_packed(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Of a batch, packed into one sequence behind the other."""
    batch, seqlen_q, *_ = q.shape
    lengths: dict[str, Any] = {}
    for name, x in (("q", q), ("k", k)):
        lengths[f"max_seqlen_{name}"] = x.shape[1]
        offsets = torch.arange(batch + 1) * x.shape[1]
        lengths[f"cu_seqlens_{name}"] = offsets.to(torch.int32)
    operands = (x.flatten(0, 1) for x in (q, k, v))
    out, lse = hopperflash.flash_attn_varlen_func(*operands, **lengths, **options)
    rows = (batch, seqlen_q)
    return out.unflatten(0, rows), lse.unflatten(1, rows).transpose(0, 1)


def _dependents() -> tuple[Subject, ...]:
    """Other kernels that start while the one before them ends: only their wait for that.

    The forward of packed sequences follows the table of its tiles, the end of the backward the
    main kernel.
    """
    waits = tuple(fault for fault in FAULTS if fault.name == "griddepcontrol-wait")
    case = Case("mutant", batch=2, seqlen_k=200, causal=True)
    packed = partial(check_forward, case, _attention_of_packed)
    return (
        Subject("forward-packed-d64", "ForwardSm90", packed, faults=waits),
        Subject("postprocess-d128", "BackwardPostprocess", _backward(128).check, faults=waits),
    )


_ALONE = partial(hopperflash.flash_attn_func, sm_margin=131)
"""Leaves one SM, whose CTA computes all tiles."""


def _persistent() -> tuple[Subject, ...]:
    """Three query tiles, and three key tiles in turn, of one CTA, or many blocks and many tiles:
    what hands memory on from tile to tile, which a CTA with one tile executes only once.
    """
    names = {
        "mbarrier-wait", "mbarrier-arrive", "mbarrier-init-count", "mbarrier-init-fewer",
        "bulk-wait", "bulk-wait-for-older",
    }  # fmt: skip
    faults = tuple(fault for fault in FAULTS if fault.name in names)
    forward = Case("mutant", seqlen_q=450, seqlen_k=450, causal=True)
    many_keys = replace(forward, seqlen_k=3392)
    backward = BackwardCase("mutant", seqlen_q=140, seqlen_k=300, causal=True, deterministic=True)
    many_tiles = replace(backward, seqlen_q=128, seqlen_k=256, heads_q=10, heads_k=10)
    return (
        Subject(
            "dynamic-forward-d64", "ForwardSm90", partial(check_forward, forward, _ALONE),
            partial(check_forward, many_keys, _ALONE),
            faults=faults,
        ),
        Subject(
            "persistent-backward-d64", "BackwardSm90", partial(check_backward, backward, _ALONE),
            partial(check_backward, many_tiles, _ALONE),
            hazards="ordered", faults=faults,
        ),
    )  # fmt: skip


def _forward_sm80() -> Subject:
    """Two causal row blocks of 128 over up to six key blocks of 64 in a ring of two stages."""

    def check() -> None:
        case = Case("mutant", seqlen_q=200, seqlen_k=330, causal=True)
        check_forward(case, hopperflash.flash_attn_func)

    return Subject("forward-sm80-d64", "ForwardSm80", check, arch="sm_80")


def _backward_sm80() -> Subject:
    """Three key tiles of 128 that take turns at dQ, for five query tiles of 64 in a ring.

    The lengths differ so that queries on a tile's diagonal see the next tile too.
    """

    def check() -> None:
        case = BackwardCase("mutant", seqlen_q=257, seqlen_k=289, causal=True, deterministic=True)
        check_backward(case, hopperflash.flash_attn_func)

    return Subject("backward-sm80-d64", "BackwardSm80", check, arch="sm_80", hazards="ordered")


SUBJECTS = (
    _forward(64), _forward(128), _backward(128), _forward_sm80(), _backward_sm80(),
    *_dependents(), *_persistent(), _paired(), _paired_backward(), _query_rows(),
)  # fmt: skip


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
_FENCED_BEFORE_S = (
    "The fence before dV^T += dO^T P, dK^T += Q^T dS or dQ = dS K. That before S = Q K^T already "
    "orders all that touched their accumulators, and their operands lie in shared memory."
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
_OUT_OF_TURN = (
    "named-barrier-sync", 1,
    "A wait for the turn of a warpgroup, which decides when it issues its GEMMs and no result. The "
    "others keep the barriers in balance.",
)  # fmt: skip
_FENCED_BEFORE = (
    "The fence before a GEMM that is issued right behind another: the fence of that one already "
    "orders all that touched its registers."
)
_MERGED_GROUP = (
    "The commit of dV += P^T dO. Its wgmmas join the group of dK += dS^T Q, whose wait covers both."
)
_FREES_REGISTERS = (
    "The wait for dV += P^T dO ahead of dQ, by which the compiler has the registers of P for dQ. "
    "PTX has registers enough, and the wait for dK covers dV."
)
_FILLED_ONCE = (
    "K and V are filled once: their empty barrier is waited for once, fresh, and no consumer "
    "arrives. The wait passes at once whatever the count."
)
_RELEASED_TWICE = (
    "Either of the two that publish a thread's additions, its fence before the barrier ahead of "
    "the counter and the release at the counter behind it, does so alone."
)
_BACKWARD = (
    *(("wgmma-wait", site, _FREES_REGISTERS) for site in (2, 7)),
    *(("wgmma-wait-for-older", site, _FREES_REGISTERS) for site in (2, 7)),
    *(("wgmma-fence", site, _FENCED_BEFORE) for site in (2, 3, 6, 7, 10, 13)),
    *(("wgmma-commit", site, _MERGED_GROUP) for site in (2, 7, 12, 16)),
    (
        "mbarrier-wait", 0,
        "K and V are filled once, so that the producer's wait for their buffers finds them fresh.",
    ),
    ("mbarrier-init-count", 1, _FILLED_ONCE),
    ("mbarrier-init-fewer", 1, _FILLED_ONCE),
    *(("global-release", site, _RELEASED_TWICE) for site in range(6)),
)  # fmt: skip
_NOTHING_LEFT = (
    "The wait behind the loop: the groups that may be outstanding there are the empty ones past "
    "the last block."
)
_FORWARD_SM80 = (
    (
        "syncthreads", 5,
        "The barrier before O takes the memory of Q. Q is read once, into registers, and barriers "
        "of the loop lie between.",
    ),
    (
        "copy-commit", 0,
        "The commit of Q and the first K. They join the group of the first V, and the wait before "
        "Q goes into registers covers all groups.",
    ),
    ("copy-wait", 5, _NOTHING_LEFT),
    (
        "copy-wait-for-older", 0,
        "The wait before Q goes into registers. Q and the first K are in the first group; the loop "
        "waits for the second, of V.",
    ),
    ("copy-wait-for-older", 5, _NOTHING_LEFT),
)  # fmt: skip
_TURN_BARRIERS = (
    "The barrier before a stage is refilled. All GEMMs of the step that read it lie before the "
    "barrier ahead of dQ, and the two barriers around the turn (deterministic) lie before whatever "
    "reads the next stage or writes dS."
)
_BACKWARD_SM80 = (
    ("syncthreads", 2, _TURN_BARRIERS),
    ("syncthreads", 6, _TURN_BARRIERS),
    (
        "syncthreads", 9,
        "The barrier before dK and dV take the memory of K and V. The barriers around the last "
        "turn (deterministic) lie behind every GEMM that reads them.",
    ),
    ("copy-wait", 3, _NOTHING_LEFT),
    ("copy-wait-for-older", 3, _NOTHING_LEFT),
    *(("global-release", site, _RELEASED_TWICE) for site in range(4)),
)  # fmt: skip
_PAIRED = (
    ("mbarrier-wait", 0, _FRESH_QUERY_BUFFER),
    ("mbarrier-arrive", 7, "The release of the last V block, which nobody waits for."),
    ("mbarrier-init-count", 1, _FRESH_QUERY_BUFFER),
    ("mbarrier-init-fewer", 1, _FRESH_QUERY_BUFFER),
)
_PAIRED_BACKWARD = (
    ("mbarrier-wait", 0, _FILLED_ONCE),
    ("mbarrier-init-count", 1, _FILLED_ONCE),
    ("mbarrier-init-fewer", 1, _FILLED_ONCE),
)
_QUERY_ROWS = (
    *(("wgmma-fence", site, _FENCED_BEFORE_S) for site in (1, 2, 3, 5, 6, 7)),
    (
        "wgmma-fence", 4,
        "The fence before S = Q K^T of a step without a mask. What touched S and dP in the step "
        "before lies ahead of its fences for dQ and dK^T.",
    ),
)  # fmt: skip
_TABLE = (
    ("forward-d64", (*_FORWARD, _OUT_OF_TURN)), ("forward-d128", _FORWARD),
    ("backward-d128", _BACKWARD),
    ("forward-paired-d128", _PAIRED), ("backward-paired-d256", _PAIRED_BACKWARD),
    ("backward-d192", _QUERY_ROWS),
    ("forward-sm80-d64", _FORWARD_SM80), ("backward-sm80-d64", _BACKWARD_SM80),
)  # fmt: skip
HARMLESS = tuple(Harmless(subject, *entry) for subject, entries in _TABLE for entry in entries)


def harmless_sites(subject: Subject, fault: Fault) -> dict[int, str]:
    """Site numbers with the reason why breaking them shows nowhere."""
    return {
        h.site: h.reason for h in HARMLESS if (h.subject, h.fault) == (subject.name, fault.name)
    }
