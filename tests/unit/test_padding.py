"""`unpad_input` and `pad_input`: what flash-attn's return, and their gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import hopperflash
from hopperflash import InvalidArgument, pad_input, unpad_input

MASK = torch.tensor([[1, 1, 1, 0], [0, 0, 0, 0], [0, 1, 0, 1], [0, 0, 1, 1]])
UNUSED = torch.tensor([[0, 0, 0, 1], [0, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]])


def hidden() -> Tensor:
    return torch.arange(1.0, 1 + 4 * 4 * 2 * 3).reshape(4, 4, 2, 3)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64])
def test_five_values(dtype: torch.dtype) -> None:
    x = hidden()
    rows, indices, cu_seqlens, largest, seqused = unpad_input(x, MASK.to(dtype))
    assert torch.equal(rows, x[MASK.bool()])
    assert indices.tolist() == [0, 1, 2, 9, 11, 14, 15]
    assert cu_seqlens.tolist() == [0, 3, 3, 5, 7]
    assert cu_seqlens.dtype == torch.int32
    assert type(largest) is int
    assert largest == 3
    assert seqused.tolist() == [3, 0, 2, 2]
    assert seqused.dtype == torch.int32


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_rows_that_do_not_count_stay_and_are_named(dtype: torch.dtype) -> None:
    x = hidden()
    rows, _, cu_seqlens, largest, seqused = unpad_input(x, MASK.to(dtype), UNUSED.to(dtype))
    assert torch.equal(rows, x[(MASK + UNUSED).bool()])
    assert cu_seqlens.tolist() == [0, 4, 4, 7, 9]
    assert largest == 4
    assert seqused.tolist() == [3, 0, 2, 2]


def test_pad_input_is_the_way_back() -> None:
    x = hidden()
    rows, indices, *_ = unpad_input(x, MASK)
    assert torch.equal(pad_input(rows, indices, 4, 4), x * MASK[..., None, None])


def test_gradients() -> None:
    x = hidden().double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: unpad_input(x, MASK)[0], x)
    rows, indices, *_ = unpad_input(hidden().double(), MASK)
    rows.requires_grad_()
    assert torch.autograd.gradcheck(lambda rows: pad_input(rows, indices, 4, 4), rows)


def test_packed_attention_of_a_padded_batch() -> None:
    """Padding as each sequence by itself, whatever stands in the rows of padding."""
    lengths = (5, 0, 9)
    mask = torch.arange(9) < torch.tensor(lengths)[:, None]
    q, k, v = (torch.randn(3, 9, heads, 16).half() for heads in (4, 2, 2))
    for x in (q, k, v):
        x[~mask] = torch.nan
    packed = [unpad_input(x, mask)[0] for x in (q, k, v)]
    _, indices, cu, largest, _ = unpad_input(q, mask)
    out = hopperflash.flash_attn_varlen_func(*packed, cu, cu, largest, largest, causal=True)
    padded = pad_input(out, indices, 3, 9)
    assert torch.equal(padded[~mask], torch.zeros_like(padded[~mask]))
    for b, n in enumerate(lengths):
        alone = hopperflash.flash_attn_func(*(x[b : b + 1, :n] for x in (q, k, v)), causal=True)
        assert torch.equal(padded[b : b + 1, :n], alone)


def test_nothing() -> None:
    rows, indices, cu_seqlens, largest, seqused = unpad_input(torch.ones(0, 4, 2), MASK[:0])
    assert (rows.shape, largest, cu_seqlens.tolist()) == ((0, 2), 0, [0])
    assert pad_input(rows, indices, 0, 4).shape == (0, 4, 2)
    assert seqused.shape == (0,)


def test_refusals() -> None:
    with pytest.raises(InvalidArgument) as refused:
        unpad_input(hidden(), MASK[:, :3], UNUSED[None])
    assert refused.value.reasons == (
        "attention_mask has shape (4, 3): give (batch, seqlen) of hidden_states, (4, 4)",
        "unused_mask has shape (1, 4, 4): give (batch, seqlen) of hidden_states, (4, 4)",
    )
    with pytest.raises(InvalidArgument, match="2 indices for 3 rows"):
        pad_input(torch.ones(3, 2), torch.arange(2), 1, 4)
