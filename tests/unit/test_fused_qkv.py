"""q, k and v in one tensor: flash-attn's signatures, no copy, and every refusal."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
import torch

import hopperflash
from hopperflash import InvalidArgument
from tests.support.fused import FUSED, OFFSETS, assert_equals_plain

FLASH_ATTN_OPTIONS = [
    "dropout_p",
    "softmax_scale",
    "causal",
    "window_size",
    "softcap",
    "alibi_slopes",
    "deterministic",
    "return_attn_probs",
]
FLASH_ATTN_OPERANDS = {
    "flash_attn_qkvpacked_func": "qkv",
    "flash_attn_kvpacked_func": "q kv",
    "flash_attn_varlen_qkvpacked_func": "qkv cu_seqlens max_seqlen",
    "flash_attn_varlen_kvpacked_func": ("q kv cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"),
}


@pytest.mark.parametrize("name", FLASH_ATTN_OPERANDS)
def test_positional_order_is_that_of_flash_attn(name: str) -> None:
    parameters = inspect.signature(getattr(hopperflash, name)).parameters.values()
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == [*FLASH_ATTN_OPERANDS[name].split(), *FLASH_ATTN_OPTIONS]


@pytest.mark.parametrize("name", FUSED)
def test_equals_the_plain_function(name: str) -> None:
    assert_equals_plain(name)


def test_every_option_arrives() -> None:
    """By position, in memory that is given, of rows that count."""
    qkv = torch.randn(20, 3, 2, 64).half()
    used = torch.tensor([3, 0, 13], dtype=torch.int32)
    out = torch.empty(20, 2, 64).half()
    options = (0.0, 0.3, True, (4, 0), 5.0, None, True, False)
    found = hopperflash.flash_attn_varlen_qkvpacked_func(
        qkv, OFFSETS, 13, *options, seqused=used, out=out, backend="cpu"
    )
    same = hopperflash.flash_attn_varlen_func(
        *qkv.unbind(1), OFFSETS, OFFSETS, 13, 13, *options, seqused_q=used, seqused_k=used
    )
    assert found.data_ptr() == out.data_ptr()
    assert torch.equal(found, same)
    with pytest.raises(hopperflash.UnsupportedProblem, match="dropout"):
        hopperflash.flash_attn_qkvpacked_func(qkv[None], 0.5)
    with (
        hopperflash.emulate("sm_90a"),
        pytest.raises(hopperflash.UnsupportedProblem, match="sm_margin 132 leaves none"),
    ):
        hopperflash.flash_attn_qkvpacked_func(qkv[None], sm_margin=132)


@pytest.mark.parametrize("name", FLASH_ATTN_OPERANDS)
def test_keywords_are_those_of_the_plain_function(name: str) -> None:
    """But for rows that count, which are the same of q, k and v in one tensor."""

    def keywords(function: Callable[..., object]) -> set[str]:
        parameters = inspect.signature(function).parameters.values()
        return {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}

    plain = "flash_attn_varlen_func" if "varlen" in name else "flash_attn_func"
    differing = keywords(getattr(hopperflash, name)) ^ keywords(getattr(hopperflash, plain))
    assert all(keyword.startswith("seqused") for keyword in differing)


REFUSALS = {
    "no tensor": (
        lambda: hopperflash.flash_attn_qkvpacked_func(None),
        "qkv is a NoneType: give a torch.Tensor (batch, seqlen, 3, heads, head_dim)",
    ),
    "two of three": (
        lambda: hopperflash.flash_attn_qkvpacked_func(torch.zeros(1, 9, 2, 2, 64)),
        "qkv has shape (1, 9, 2, 2, 64): give (batch, seqlen, 3, heads, head_dim)",
    ),
    "heads first": (
        lambda: hopperflash.flash_attn_kvpacked_func(None, torch.zeros(9, 2, 2, 64)),
        "kv has shape (9, 2, 2, 64): give (batch, seqlen_k, 2, heads_k, head_dim)",
    ),
    "dense": (
        lambda: hopperflash.flash_attn_varlen_qkvpacked_func(
            torch.zeros(1, 9, 3, 2, 64), OFFSETS, 13
        ),
        "qkv has shape (1, 9, 3, 2, 64): give (total, 3, heads, head_dim)",
    ),
    "three of two": (
        lambda: hopperflash.flash_attn_varlen_kvpacked_func(
            None, torch.zeros(20, 3, 2, 64), OFFSETS, OFFSETS, 13, 13
        ),
        "kv has shape (20, 3, 2, 64): give (total_k, 2, heads_k, head_dim)",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refused(name: str) -> None:
    call, reason = REFUSALS[name]
    with pytest.raises(InvalidArgument) as refused:
        call()
    assert str(refused.value) == reason
