"""What was summed under an old row maximum, when a block of keys brings a new one or none."""

from __future__ import annotations

import pytest
import torch

import hopperflash
from tests.support.cases import Case, Inputs, expected
from tests.support.tolerance import assert_close

pytestmark = [pytest.mark.emulated, pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])]

CASE = Case("rescaling", seqlen_q=16, seqlen_k=512)  # several blocks, one warp with queries


def _inputs() -> Inputs:
    """Zeros, to be filled."""
    shapes = ((1, rows, 1, CASE.head_dim) for rows in (CASE.seqlen_q, *[CASE.seqlen_k] * 2))
    return Inputs(*(torch.zeros(shape, dtype=CASE.torch_dtype) for shape in shapes))


def _check(arch: str, inputs: Inputs) -> None:
    want = expected(CASE, inputs)
    with hopperflash.emulate(arch) as run:
        out, lse = hopperflash.flash_attn_func(*inputs, **CASE.options)
    assert run.hazards == []
    assert_close(out, want.out, want.low_out, name="out")
    assert_close(lse, want.lse, want.low_lse, terms=want.lse, name="lse")


def test_equal_scores_weigh_equally_however_large(arch: str) -> None:
    """The product of scale and maximum is rounded, whose error must not grow with the blocks."""
    q, k, v = inputs = _inputs()
    q.fill_(1000.0)
    k.fill_(1000.0)
    v.fill_(1.0)
    v[:, CASE.seqlen_k // 2 :] = -1.0
    _check(arch, inputs)


def test_one_row_of_a_warp_may_have_new_maxima_alone(arch: str) -> None:
    """Blocks are visited from the last key down: scores of row 5 grow, those of the others fall."""
    q, k, v = inputs = _inputs()
    q[..., 0] = -8.0
    q[:, 5, :, 0] = 8.0
    k[0, :, 0, 0] = -torch.arange(CASE.seqlen_k) / 64
    v[0, :, 0, 0] = torch.arange(CASE.seqlen_k) % 7
    _check(arch, inputs)
