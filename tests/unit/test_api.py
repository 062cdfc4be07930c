"""The user functions on tensors: refusals, planning, autocast, the boundaries of `emulate`."""

from __future__ import annotations

import pytest
import torch

import hopperflash
from hopperflash import InvalidArgument, UnsupportedProblem
from hopperflash.runtime import emulation, tensors


def qkv(*, seqlen: int = 16, head_dim: int = 64, dtype: torch.dtype = torch.bfloat16):
    return tuple(torch.randn(1, seqlen, 2, head_dim).to(dtype) for _ in range(3))


def test_public_names_exist_and_are_listed():
    for name in hopperflash.__all__:
        assert hasattr(hopperflash, name)
        assert name in dir(hopperflash)
    with pytest.raises(AttributeError, match="no attribute 'flash'"):
        _ = hopperflash.flash


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda x: x.tolist(), "q is a list: give a torch.Tensor"),
        (lambda x: x.to("meta"), "q is on meta: give tensors on cpu or cuda"),
        (lambda x: x.to_sparse(), "q has layout torch.sparse_coo: give a dense tensor"),
        (lambda x: None, "q is a NoneType: give a torch.Tensor"),
    ],
    ids=["list", "meta", "sparse", "none"],
)
def test_what_is_no_dense_tensor_is_refused(make, words):
    q, k, v = qkv()
    with pytest.raises(InvalidArgument, match=words):
        hopperflash.flash_attn_func(make(q), k, v)
    answer = hopperflash.supports(make(q), k, v)
    assert not answer
    assert any(words in reason for reason in answer.reasons)


def test_every_reason_comes_at_once():
    q = torch.zeros(2, 16, 3, 12, dtype=torch.float16)
    k = torch.zeros(1, 16, 2, 264, dtype=torch.bfloat16)
    with pytest.raises(InvalidArgument) as refused:
        hopperflash.flash_attn_func(q, k, k[0], window_size=(-5, 0), softcap="no", dropout_p=None)
    text = str(refused.value)
    for reason in (
        "v has shape (16, 2, 264)",
        "batch sizes of q, k differ: (2, 1)",
        "q has 3 heads, not a multiple of the 2 heads of k",
        "head_dim of q is 12, of k 264",
        "head_dim of q is 12: give a multiple of 8",
        "head_dim of k is 264: give a multiple of 8",
        "dtypes differ (q float16, k bfloat16, v bfloat16)",
        "-5",
        "softcap is 'no': give a number",
        "dropout_p is None: give a number",
    ):
        assert reason in text


def test_options_of_the_wrong_kind_are_refused():
    q, k, v = qkv()
    options = {
        "causal": torch.tensor([True, False]),
        "deterministic": [1],
        "return_attn_probs": "no",
        "softmax_scale": 1e39,
        "softcap": 1e-310,
    }
    answer = hopperflash.supports(q, k, v, **options)
    assert [name for name in options if any(name in reason for reason in answer.reasons)] == [
        *options
    ]
    assert "unknown arch 90" in hopperflash.supports(q, k, v, arch=90).reasons[0]


@pytest.mark.parametrize("options", [{"window_size": (2**63, 0)}, {"sm_margin": 2**63}])
def test_numbers_that_no_operator_can_hold_are_refused(options):
    q = torch.zeros(1, 8, 1, 64).half()
    with pytest.raises(InvalidArgument, match=f"is {2**63}: give"):
        hopperflash.flash_attn_func(q, q, q, **options)


def test_a_negated_view_counts_with_its_sign():
    q, k, v = qkv()
    negated = torch._neg_view(q)
    assert torch.equal(
        hopperflash.flash_attn_func(negated, k, v), hopperflash.flash_attn_func(-q, k, v)
    )
    accepted = tensors.concrete(negated)
    assert not accepted.is_neg()


def test_fp32_needs_autocast():
    q, k, v = qkv(dtype=torch.float32)
    with pytest.raises(InvalidArgument, match=r"call inside torch\.autocast"):
        hopperflash.flash_attn_func(q, k, v)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = hopperflash.flash_attn_func(q, k, v)
    assert out.dtype is torch.bfloat16
    assert torch.equal(out, hopperflash.flash_attn_func(q.bfloat16(), k.bfloat16(), v.bfloat16()))


@pytest.mark.parametrize("arch", ["sm_90a", "sm_86", "cpu"])
def test_a_named_arch_is_planned_for_without_memory(arch):
    """The plan of meta tensors is that of real ones, but for the device it names."""
    shapes = {"q": (2, 100, 4, 64), "k": (2, 300, 2, 64), "v": (2, 300, 2, 72)}
    real, meta = (
        [torch.empty(shape, dtype=torch.float16, device=where) for shape in shapes.values()]
        for where in ("cpu", "meta")
    )
    for direction in ("forward", "backward"):
        asked = {"arch": arch, "direction": direction, "causal": True}
        plan = hopperflash.make_plan(*meta, **asked)
        assert plan.steps == hopperflash.make_plan(*real, **asked).steps
        assert plan.problem.device == "meta"
        assert hopperflash.supports(*meta, **asked)
    assert "on meta" in hopperflash.explain(*meta, arch=arch)


def test_meta_tensors_are_never_cast_and_mix_with_no_others():
    q, k, v = (torch.empty(1, 8, 2, 64, device="meta") for _ in range(3))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        refused = hopperflash.supports(q, k, v, arch="sm_80").reasons
    assert any("q is float32" in reason for reason in refused)
    mixed = hopperflash.supports(q.half(), *qkv(dtype=torch.float16)[1:], arch="sm_80").reasons
    assert any("q on meta, k on cpu" in reason for reason in mixed)


@pytest.mark.parametrize("name", ["direction", "backend"])
def test_unhashable_requests_are_refused(name):
    with pytest.raises(InvalidArgument, match="give"):
        hopperflash.make_plan(*qkv(), **{name: ["forward"]})
    assert "give" in hopperflash.supports(*qkv(), **{name: ["forward"]}).reasons[0]


def test_supports_takes_all_options_and_never_raises():
    q, k, v = qkv()
    assert hopperflash.supports(q, k, v, causal=True, return_lse=True)
    assert hopperflash.supports(q, k, v, arch="sm_90a", direction="backward")
    refusals = [
        hopperflash.supports(q, k, v, dropout_p=0.5),
        hopperflash.supports(q, k, v, arch="sm_1"),
        hopperflash.supports(q, k, v, direction="sideways"),
        hopperflash.supports(q, k[0], v),
        hopperflash.supports(q, k, v, arch="sm_90a", softmax_scale=-1.0),
    ]
    for answer in refusals:
        assert not answer
        assert answer.reasons


def test_plan_of_cpu_tensors_follows_emulate():
    q, k, v = qkv()
    assert hopperflash.make_plan(q, k, v).backend == "cpu"
    with hopperflash.emulate("sm_90a"):
        plan = hopperflash.make_plan(q, k, v, causal=True)
        assert (plan.backend, plan.arch.name) == ("sm90", "sm_90a")
        assert "causal" in hopperflash.explain(q, k, v, causal=True)
    assert hopperflash.make_plan(q, k, v).backend == "cpu"


def test_emulation_is_for_cpu_tensors_only():
    with hopperflash.emulate("sm_90a"):
        assert emulation.session_of(torch.device("cpu")) is not None
        assert emulation.session_of(torch.device("cuda", 0)) is None
    assert emulation.session_of(torch.device("cpu")) is None


def test_emulate_lists_what_is_wrong():
    with (
        pytest.raises(InvalidArgument) as refused,
        hopperflash.emulate("sm_1", schedule="sometimes"),
    ):
        pass
    assert len(refused.value.reasons) == 2
    with pytest.raises(InvalidArgument, match="is no GPU"), hopperflash.emulate("cpu"):
        pass


def test_unsupported_options_name_every_backend():
    q, k, v = qkv()
    with pytest.raises(UnsupportedProblem, match="dropout") as refused:
        hopperflash.flash_attn_func(q, k, v, 0.1)
    assert len(refused.value.reasons) >= 1
