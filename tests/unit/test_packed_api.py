"""Packed sequences through the public functions: every refusal, and what counts as given."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import hopperflash
from hopperflash import InvalidArgument
from hopperflash.runtime import tensors

TOTAL = 20
OFFSETS = (0, 5, 5, 18)


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def arguments(**changes):
    """Keyword arguments of a good call, with changes."""
    good = {
        "q": torch.randn(TOTAL, 4, 64).bfloat16(),
        "k": torch.randn(TOTAL, 2, 64).bfloat16(),
        "v": torch.randn(TOTAL, 2, 64).bfloat16(),
        "cu_seqlens_q": int32(*OFFSETS),
        "cu_seqlens_k": int32(*OFFSETS),
        "max_seqlen_q": 13,
        "max_seqlen_k": 13,
    }
    return {**good, **changes}


REFUSALS = {
    "q of rank 4": (
        {"q": torch.zeros(1, 20, 4, 64).bfloat16()},
        "q has shape (1, 20, 4, 64): give",
    ),
    "k of rank 1": ({"k": torch.zeros(20).bfloat16()}, "k has shape (20,): give (total, heads"),
    "q of rank 0": ({"q": torch.zeros(()).bfloat16()}, "q has shape (): give (total, heads"),
    "no tensor": ({"k": None}, "k is a NoneType: give a torch.Tensor"),
    "fp32": (
        {name: torch.zeros(20, 2, 64) for name in "qkv"},
        "q is float32: cast to bfloat16 or float16, or call inside torch.autocast",
    ),
    "rows of k and v": ({"v": torch.zeros(21, 2, 64).bfloat16()}, "k has 20 keys, v has 21"),
    "offsets in floats": ({"cu_seqlens_q": torch.zeros(4)}, "cu_seqlens_q is torch.float32: give"),
    "offsets in a list": ({"cu_seqlens_k": [0, 20]}, "cu_seqlens_k is a list: give a torch.Tensor"),
    "offsets elsewhere": (
        {"cu_seqlens_q": torch.zeros(4, dtype=torch.int32, device="meta")},
        "cu_seqlens_q is on meta: give tensors on cpu or cuda",
    ),
    "offsets of rank 2": (
        {"cu_seqlens_k": int32(0, 20)[None]},
        "cu_seqlens_k has shape (1, 2): give one dimension",
    ),
    "no offsets of q": ({"cu_seqlens_q": None}, "cu_seqlens_q is missing: give (sequences + 1,)"),
    "no offsets of k": ({"cu_seqlens_k": None}, "cu_seqlens_k is missing: give (sequences + 1,)"),
    "offsets of nothing": ({"cu_seqlens_q": int32()}, "hold one offset more than sequences: not 0"),
    "counts of offsets": (
        {"cu_seqlens_k": int32(0, 20)},
        "numbers of sequences differ (cu_seqlens_q 3, cu_seqlens_k 1)",
    ),
    "counts of lengths": (
        {"seqused_k": int32(5, 0)},
        "numbers of sequences differ (cu_seqlens_q 3, cu_seqlens_k 3, seqused_k 2)",
    ),
    "descending": (
        {"cu_seqlens_q": int32(0, 5, 4, 18)},
        "cu_seqlens_q descends from 5 to 4 at sequence 1",
    ),
    "beyond the rows": ({"cu_seqlens_k": int32(0, 5, 5, 21)}, "cu_seqlens_k goes from 0 to 21"),
    "before the rows": ({"cu_seqlens_k": int32(-1, 5, 5, 20)}, "cu_seqlens_k goes from -1 to 20"),
    "beyond int32": (
        {"cu_seqlens_q": torch.tensor([0, 5, 5, 2**32 + 7])},
        "cu_seqlens_q goes from 0 to 4294967303: stay within [0, 20]",
    ),
    "more than a sequence": (
        {"seqused_q": int32(5, 1, 13)},
        "seqused_q is 1 at sequence 1: stay within its 0 rows",
    ),
    "less than nothing": ({"seqused_k": int32(-1, 0, 0)}, "seqused_k is -1 at sequence 0"),
    "max_seqlen a float": (
        {"max_seqlen_q": 13.0},
        "max_seqlen_q is a float: give an int, or a 0-d",
    ),
    "max_seqlen missing": ({"max_seqlen_k": None}, "max_seqlen_k is a NoneType: give an int"),
    "max_seqlen negative": ({"max_seqlen_q": -1}, "max_seqlen_q is -1: give a length"),
    "max_seqlen of rank 1": (
        {"max_seqlen_k": int32(13)},
        "max_seqlen_k is a torch.int32 tensor of shape (1,): give an int",
    ),
    "max_seqlen in floats": (
        {"max_seqlen_k": torch.tensor(13.0)},
        "max_seqlen_k is a torch.float32 tensor of shape ()",
    ),
    "negative window": ({"window_size": (-3, 0)}, "window_size left is -3: give a length >= 0"),
    "half a window": ({"window_size": 7}, "window_size is 7: give (left, right)"),
    "window in floats": ({"window_size": (7.5, 0)}, "window_size left is 7.5: give an integer"),
    "NaN cap": ({"softcap": math.nan}, "softcap is nan: give a positive number that fp32 holds"),
    "negative cap": ({"softcap": -2.0}, "softcap is -2.0: give a positive number"),
    "infinite cap": ({"softcap": math.inf}, "softcap is inf: give a positive number"),
    "NaN scale": ({"softmax_scale": math.nan}, "softmax_scale is nan: give a number that fp32"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refused(name):
    changes, reason = REFUSALS[name]
    with pytest.raises(InvalidArgument) as refused:
        hopperflash.flash_attn_varlen_func(**arguments(**changes))
    assert any(reason in found for found in refused.value.reasons), refused.value
    named = {key: value for key, value in arguments(**changes).items() if value is not None}
    if "k" in named and name != "max_seqlen missing":
        answer = hopperflash.supports(**named)
        assert any(reason in found for found in answer.reasons), answer


def test_all_that_is_wrong_is_in_one_error():
    with pytest.raises(InvalidArgument) as refused:
        hopperflash.flash_attn_varlen_func(
            **arguments(
                q=torch.zeros(20, 3, 60).half(),
                cu_seqlens_q=int32(0, 9, 8, 21),
                cu_seqlens_k=int32(0, 5, 5, 5, 5),
                seqused_k=int32(6, 0, 0, 0),
                window_size=(-2, -2),
                softcap=math.nan,
                dropout_p=2.0,
            )
        )
    for reason in (
        "numbers of sequences differ",
        "not a multiple of the 2 heads of k",
        "head_dim of q is 60, of k 64",
        "dtypes differ",
        "dropout_p is 2.0",
        "softcap is nan",
        "window_size left is -2",
        "window_size right is -2",
        "cu_seqlens_q goes from 0 to 21",
        "cu_seqlens_q descends from 9 to 8 at sequence 1",
        "seqused_k is 6 at sequence 0: stay within its 5 rows",
    ):
        assert sum(reason in found for found in refused.value.reasons) == 1, reason


def test_what_is_no_tensor_is_in_one_error():
    with pytest.raises(InvalidArgument) as refused:
        hopperflash.flash_attn_varlen_func([1], None, 3, "x", {}, 1.5, "long")
    assert len(refused.value.reasons) == 7


def test_bounds_may_be_tensors_and_are_not_looked_at():
    out = hopperflash.flash_attn_varlen_func(**(given := arguments()))
    for bound in (0, torch.tensor(13), torch.tensor(13, dtype=torch.int32)):
        changed = {**given, "max_seqlen_q": bound, "max_seqlen_k": bound}
        assert torch.equal(out, hopperflash.flash_attn_varlen_func(**changed))


def test_offsets_in_int64_are_cast_once(monkeypatch):
    casts = []
    cast = tensors.int32
    monkeypatch.setattr(tensors, "int32", lambda lengths: casts.append(lengths) or cast(lengths))
    given = arguments()
    out = hopperflash.flash_attn_varlen_func(**given)
    wide = {name: x.long() for name, x in given.items() if name.startswith("cu_")}
    assert torch.equal(out, hopperflash.flash_attn_varlen_func(**{**given, **wide}))
    assert len(casts) == 2
    assert all(x.dtype is torch.int32 for x in cast(wide).values())


def test_plans_of_packed_sequences():
    given = arguments()
    q, k, v = (given.pop(name) for name in "qkv")
    plan = hopperflash.make_plan(q, k, v, arch="sm_90a", **given)
    assert plan.problem.sequences == 3
    assert plan.problem.is_packed
    assert [call.spec.ref.name for call in plan.calls] == ["TileTable", "ForwardSm90"]
    assert hopperflash.supports(q, k, v, arch="sm_90a", direction="backward", **given)
    text = hopperflash.explain(q, k, v, arch="sm_90a", seqused_k=int32(5, 0, 3), **given)
    assert "packed sequences: 3, 4 query heads" in text


def test_lengths_change_neither_plan_nor_kernel():
    given = arguments()
    plans = {
        hopperflash.make_plan(**{**given, "cu_seqlens_q": offsets}, arch="sm_90a")
        for offsets in (int32(0, 5, 5, 18), int32(0, 0, 0, 20), int32(3, 4, 10, 11))
    }
    assert len(plans) == 1
