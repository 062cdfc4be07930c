"""flash-attn-4's loops, as published figures of this release have them: optional."""

from __future__ import annotations

import importlib.util

import pytest

from hopperflash.problem import MaskKind
from profiling.compare_sass import Case, peer_side
from profiling.peer import compile_peer

pytestmark = [
    pytest.mark.compile,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not importlib.util.find_spec("flash_attn"), reason="flash-attn-4 is not installed"
    ),
]


@pytest.mark.parametrize(
    ("head_dim", "mask", "forward", "backward"),
    [
        (64, MaskKind.CAUSAL, (437, 535), (714, 714)),
        (96, MaskKind.FULL, (520, 520), (368.5, 368.5)),
        (128, MaskKind.FULL, (457, 457), (465, 465)),
        (128, MaskKind.WINDOW, (477, 604), (509, 509)),
    ],
)
def test_instructions_of_a_step(head_dim, mask, forward, backward):
    """Interior and boundary; at head dim 96 one warpgroup of two computes dQ (397 and 340)."""
    kernels = compile_peer(head_dim, head_dim, mask.value)
    for direction, expected in (("forward", forward), ("backward", backward)):
        found = peer_side(Case(direction, head_dim, head_dim, mask), kernels[direction])
        assert (found.interior.instructions, found.boundary.instructions) == expected
        assert (found.spill_bytes, found.stack_bytes) == (0, 0)
        assert not any(step.serialised for step in found.steps)
        assert found.masks_always == (direction == "backward")
