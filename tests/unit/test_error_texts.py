"""Wrong calls, and all that is said of each: every reason at once, with the values found."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import hopperflash
from hopperflash import InvalidArgument, UnsupportedProblem


def bf16(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16()


def good() -> dict[str, Any]:
    """A good call: 2 batch entries, 4 query heads over 2 key heads, head_dim 64."""
    return {"q": bf16(2, 16, 4, 64), "k": bf16(2, 20, 2, 64), "v": bf16(2, 20, 2, 64)}


def alike(*shape: int) -> dict[str, Tensor]:
    return {name: bf16(*shape) for name in "qkv"}


CAST = "cast to bfloat16 or float16"
STEP = "give a multiple of 8 from 8 to 256 (pad with zeros)"
MODES = "give (batch, seqlen, heads, head_dim)"
BOUND = "give a length >= 0, or -1 or None for unbounded"
DROPOUT = "dropout_p 0.1: dropout is not implemented; give 0"
ALIBI = "alibi_slopes: the ALiBi bias is not implemented; give None"
PROBS = "return_attn_probs: probabilities are never materialised; use return_lse=True"
BACKEND = "unknown backend 'sm70': give one of sm90, sm80, cpu"

INVALID: dict[str, tuple[dict[str, Any], list[str]]] = {
    "fp32": (
        {name: torch.zeros(2, 16, 2, 64) for name in "qkv"},
        [f"{name} is float32: {CAST}, or call inside torch.autocast" for name in "qkv"],
    ),
    "fp64 and int8": (
        {"q": torch.zeros(2, 16, 4, 64).double(), "k": torch.zeros(2, 20, 2, 64, dtype=torch.int8)},
        [
            f"q is float64: {CAST}",
            f"k is int8: {CAST}",
            "dtypes differ (q float64, k int8, v bfloat16): give one dtype",
        ],
    ),
    "two dtypes": (
        {"v": bf16(2, 20, 2, 64).half()},
        ["dtypes differ (q bfloat16, k bfloat16, v float16): give one dtype"],
    ),
    "two devices": (
        {"k": bf16(2, 20, 2, 64).to("meta")},
        ["k is on meta: give tensors on cpu or cuda"],
    ),
    "head_dim 300": (alike(1, 8, 2, 300), [f"head_dim of {x} is 300: {STEP}" for x in "qv"]),
    "head_dim 12": (alike(1, 8, 2, 12), [f"head_dim of {x} is 12: {STEP}" for x in "qv"]),
    "head_dim 0": (alike(1, 8, 2, 0), [f"head_dim of {x} is 0: {STEP}" for x in "qv"]),
    "head dims of q and k": (
        {"q": bf16(2, 16, 4, 72)},
        ["head_dim of q is 72, of k 64: give equal ones"],
    ),
    "6 heads over 4": (
        {"q": bf16(1, 8, 6, 64), "k": bf16(1, 8, 4, 64), "v": bf16(1, 8, 4, 64)},
        ["q has 6 heads, not a multiple of the 4 heads of k"],
    ),
    "no heads": (alike(1, 8, 0, 64), ["q has 0 heads, k has 0: give at least one of each"]),
    "3 dimensions": (alike(8, 2, 64), [f"{x} has shape (8, 2, 64): {MODES}" for x in "qkv"]),
    "5 dimensions of one": (
        {"v": bf16(1, 2, 20, 2, 64)},
        [f"v has shape (1, 2, 20, 2, 64): {MODES}"],
    ),
    "batch": ({"q": bf16(3, 16, 4, 64)}, ["batch sizes of q, k, v differ: (3, 2, 2)"]),
    "keys": ({"v": bf16(2, 21, 2, 64)}, ["k has 20 keys, v has 21: give as many of both"]),
    "key heads": ({"v": bf16(2, 20, 4, 64)}, ["k has 2 heads, v has 4: give as many of both"]),
    "window": ({"window_size": (-5, 3)}, [f"window_size left is -5: {BOUND}"]),
    "window, both": (
        {"window_size": (-2, 1.5)},
        [
            f"window_size left is -2: {BOUND}",
            "window_size right is 1.5: give an integer, or -1 or None",
        ],
    ),
    "window of three": (
        {"window_size": (1, 2, 3)},
        ["window_size is (1, 2, 3): give (left, right), -1 or None for unbounded"],
    ),
    "numbers": (
        {"dropout_p": 1.5, "softmax_scale": math.nan, "softcap": -30.0},
        [
            "dropout_p is 1.5: give a probability in [0, 1)",
            "softmax_scale is nan: give a number that fp32 holds, or None for 1/sqrt(d)",
            "softcap is -30.0: give a positive number that fp32 holds, or 0",
        ],
    ),
    "switches": (
        {"causal": "yes", "deterministic": None},
        ["causal is 'yes': give True or False", "deterministic is None: give True or False"],
    ),
    "backend": ({"backend": "sm70"}, [BACKEND]),
    "a list, sparse, and options": (
        {
            "q": [1.0],
            "k": bf16(2, 20, 2, 64).to_sparse(),
            "window_size": (0, -3),
            "dropout_p": 0.1,
            "backend": "sm70",
        },
        [
            "q is a list: give a torch.Tensor",
            "k has layout torch.sparse_coo: give a dense tensor",
            f"window_size right is -3: {BOUND}",
            DROPOUT,
            BACKEND,
        ],
    ),
    "options that nobody honours, beside others": (
        {**alike(1, 8, 2, 12), "alibi_slopes": torch.ones(2), "return_attn_probs": True},
        [*[f"head_dim of {x} is 12: {STEP}" for x in "qv"], ALIBI, PROBS],
    ),
    "memory for the output, beside an option": (
        {"out": bf16(2, 16, 4, 72), "softcap": math.inf, "backend": "sm70"},
        [
            "softcap is inf: give a positive number that fp32 holds, or 0",
            "out has shape (2, 16, 4, 72): give (2, 16, 4, 64)",
            BACKEND,
        ],
    ),
}


@pytest.mark.parametrize("name", INVALID)
def test_an_invalid_call(name):
    changes, reasons = INVALID[name]
    arguments = {**good(), **changes}
    with pytest.raises(InvalidArgument) as refused:
        hopperflash.flash_attn_func(**arguments)
    assert list(refused.value.reasons) == reasons
    assert list(hopperflash.supports(**arguments).reasons) == reasons


def test_a_nested_tensor_is_refused():
    nested = torch.nested.nested_tensor([bf16(3, 2, 64), bf16(5, 2, 64)], layout=torch.strided)
    with pytest.raises(InvalidArgument, match="q is a nested tensor: give packed sequences"):
        hopperflash.flash_attn_func(**{**good(), "q": nested})


def test_what_a_plan_is_asked_for_is_refused_with_the_rest():
    asked = {"arch": "sm_1", "direction": "sideways", "backend": "sm70"}
    reasons = hopperflash.supports(**alike(1, 8, 2, 12), **asked).reasons
    assert [reason.split(":")[0] for reason in reasons] == [
        "head_dim of q is 12",
        "head_dim of v is 12",
        "direction is 'sideways'",
        "unknown backend 'sm70'",
        "unknown arch 'sm_1'",
    ]


def test_what_no_backend_honours_is_all_in_one_message():
    asked = {"dropout_p": 0.1, "alibi_slopes": torch.ones(4), "return_attn_probs": True}
    with pytest.raises(UnsupportedProblem, match="no backend computes this forward") as refused:
        hopperflash.flash_attn_func(**good(), **asked)
    for backend in ("sm90", "sm80", "cpu"):
        for reason in (DROPOUT, ALIBI, PROBS):
            assert f"{backend}: {reason}" in refused.value.reasons


BACKWARD: dict[str, tuple[dict[str, Any], list[str]]] = {
    "lse with heads last": (
        {"lse": torch.zeros(2, 16, 4)},
        ["lse has shape (2, 16, 4): give (2, 4, 16)"],
    ),
    "lse missing": ({"lse": None}, ["lse is a NoneType: give a torch.Tensor"]),
    "several, beside an option": (
        {
            "lse": torch.zeros(2, 4, 16).half(),
            "dout": bf16(2, 3, 4, 64),
            "dq": bf16(2, 16, 1, 64).expand(2, 16, 4, 64),
            "window_size": (-5, 3),
        },
        [
            f"window_size left is -5: {BOUND}",
            "dout has shape (2, 3, 4, 64): give (2, 16, 4, 64)",
            "lse has dtype float16: give float32",
            "dq has strides (1024, 64, 0, 1) for shape (2, 16, 4, 64): its elements share memory,"
            " give each its own",
        ],
    ),
}


@pytest.mark.parametrize("name", BACKWARD)
def test_an_invalid_backward(name):
    changes, reasons = BACKWARD[name]
    results = {"dout": bf16(2, 16, 4, 64), "out": bf16(2, 16, 4, 64), "lse": torch.zeros(2, 4, 16)}
    with pytest.raises(InvalidArgument) as refused:
        hopperflash.flash_attn_backward(**{**results, **good(), **changes})
    assert list(refused.value.reasons) == reasons


@pytest.mark.parametrize("options", [{"softcap": -1.0}, {"window_size": 7}])
def test_an_option_is_refused_once_for_packed_sequences_too(options):
    offsets = torch.tensor([0, 5, 20], dtype=torch.int32)
    with pytest.raises(InvalidArgument) as refused:
        hopperflash.flash_attn_varlen_func(
            **alike(20, 2, 64),
            cu_seqlens_q=offsets,
            cu_seqlens_k=offsets,
            max_seqlen_q=15,
            max_seqlen_k=15,
            out=bf16(19, 2, 64),
            **options,
        )
    option, memory = refused.value.reasons
    assert option.startswith(next(iter(options)))
    assert memory == "out has shape (19, 2, 64): give (20, 2, 64)"
