"""`build_problem`: what it makes of good facts, and every reason it has against bad ones."""

from __future__ import annotations

import math
import os
import pickle
import subprocess
import sys

import pytest

from hopperflash.errors import InvalidArgument
from hopperflash.problem import (
    AttnOptions,
    DType,
    MaskKind,
    MaskSpec,
    backward_problem,
    build_problem,
)
from tests.support.problems import Sizes, facts, problem


def refusal(q, k, v, options=None) -> InvalidArgument:
    with pytest.raises(InvalidArgument) as refused:
        build_problem(q, k, v, options)
    return refused.value


def test_sizes_and_defaults():
    built = problem(Sizes(2, 200, 300, 6, 2, 64, 128))
    assert (built.batch, built.seqlen_q, built.seqlen_k) == (2, 200, 300)
    assert (built.heads_q, built.heads_k, built.group) == (6, 2, 3)
    assert (built.head_dim, built.head_dim_v) == (64, 128)
    assert built.dtype is DType.BFLOAT16
    assert built.softmax_scale == pytest.approx(1 / math.sqrt(64))
    assert built.mask == MaskSpec()
    assert [name for name, _ in built.operands] == ["q", "k", "v"]


def test_options_become_facts():
    options = AttnOptions(0.1, 0.5, True, (7, -1), 30.0, True, True, True)
    built = problem(options=options)
    assert (built.dropout_p, built.softmax_scale, built.softcap) == (0.1, 0.5, 30.0)
    assert built.mask == MaskSpec(7, 0)
    assert built.alibi and built.deterministic and built.return_attn_probs


def test_scale_zero_is_not_the_default():
    assert problem(options=AttnOptions(softmax_scale=0.0)).softmax_scale == 0.0


def test_numbers_that_no_operator_can_hold_are_refused():
    options = AttnOptions(window_size=(2**63, 2**63 - 1), sm_margin=2**63)
    assert refusal(
        facts(2, 10, 4, 64), facts(2, 10, 4, 64), facts(2, 10, 4, 64), options
    ).reasons == (
        f"sm_margin is {2**63}: give the number of SMs to leave free, or 0",
        f"window_size left is {2**63}: give a length below 2**63, or -1 or None",
    )


def test_every_reason_at_once():
    refused = refusal(
        facts(2, 10, 4, 65, dtype="float32"),
        facts(3, 20, 3, 64, dtype="float16", device="cuda:0"),
        facts(2, 21, 2, 264, dtype="int8"),
        AttnOptions(1.0, math.inf, window_size=(-5, -2), softcap=-1.0),
    )
    expected = [
        "batch sizes of q, k, v differ: (2, 3, 2)",
        "k has 20 keys, v has 21",
        "k has 3 heads, v has 2",
        "q has 4 heads, not a multiple of the 3 heads of k",
        "head_dim of q is 65, of k 64",
        "head_dim of q is 65: give a multiple of 8 from 8 to 256",
        "head_dim of v is 264: give a multiple of 8 from 8 to 256",
        "q is float32: cast to bfloat16 or float16, or call inside torch.autocast",
        "v is int8: cast to bfloat16 or float16",
        "dtypes differ (q float32, k float16, v int8)",
        "devices differ (q on cpu, k on cuda:0, v on cpu)",
        "dropout_p is 1.0: give a probability in [0, 1)",
        "softmax_scale is inf",
        "softcap is -1.0",
        "window_size left is -5",
        "window_size right is -2",
    ]
    assert len(refused.reasons) == len(expected)
    for reason, beginning in zip(refused.reasons, expected, strict=True):
        assert reason.startswith(beginning)
        assert f"\n- {reason}" in str(refused)


def test_rank_is_reported_per_operand_beside_the_rest():
    refused = refusal(facts(10, 4, 64), facts(1, 10, 4, 64), facts(64, dtype="float16"))
    assert [reason.split(":")[0] for reason in refused.reasons] == [
        "q has shape (10, 4, 64)",
        "v has shape (64,)",
        "dtypes differ (q bfloat16, k bfloat16, v float16)",
    ]


@pytest.mark.parametrize(("heads_q", "heads_k"), [(0, 1), (1, 0), (0, 0)])
def test_no_heads(heads_q, heads_k):
    q, kv = facts(1, 8, heads_q, 64), facts(1, 8, heads_k, 64)
    assert refusal(q, kv, kv).reasons == (
        f"q has {heads_q} heads, k has {heads_k}: give at least one of each",
    )


@pytest.mark.parametrize("head_dim", [0, 4, 12, 257, 264])
def test_head_dims_out_of_range(head_dim):
    operand = facts(1, 8, 2, head_dim)
    assert len(refusal(operand, operand, operand).reasons) == 2


@pytest.mark.parametrize("head_dim", range(8, 257, 8))
def test_head_dims_in_range(head_dim):
    assert problem(Sizes(head_dim=head_dim)).head_dim == head_dim


@pytest.mark.parametrize("dropout_p", [-0.1, 1.0, math.nan])
def test_dropout_out_of_range(dropout_p):
    with pytest.raises(InvalidArgument, match="dropout_p is"):
        problem(options=AttnOptions(dropout_p=dropout_p))


@pytest.mark.parametrize("sizes", [Sizes(batch=0), Sizes(seqlen_q=0), Sizes(seqlen_k=0)])
def test_empty_problems_are_valid(sizes):
    empty = problem(sizes)
    assert empty.is_empty
    assert empty.useful_flops("forward") == 0


def test_signature_knows_no_lengths_strides_or_bounds():
    one = problem(Sizes(1, 8, 16, 1, 1, 64), AttnOptions(causal=True, softmax_scale=1.0))
    other = problem(Sizes(3, 999, 77, 8, 2, 72, 8), AttnOptions(causal=True, window_size=(None, 3)))
    assert one.signature == other.signature
    assert hash(one.signature) == hash(other.signature)
    windows = [problem(options=AttnOptions(window_size=(n, n))).signature for n in (1, 10_000)]
    assert windows[0] == windows[1]


def test_signature_knows_what_changes_code():
    signatures = {
        problem(options=options).signature
        for options in (
            AttnOptions(),
            AttnOptions(causal=True),
            AttnOptions(window_size=(3, 3)),
            AttnOptions(softcap=30.0),
        )
    }
    assert len(signatures) == 4
    assert {signature.mask_kind for signature in signatures} == set(MaskKind)


def test_useful_flops_counts_visible_pairs():
    built = problem(Sizes(2, 5, 7, 4, 2, 64, 128), AttnOptions(causal=True))
    pairs = sum(min(7, i + 7 - 5 + 1) for i in range(5))
    assert built.useful_flops("forward") == 2 * 4 * pairs * 2 * (64 + 128)
    assert built.useful_flops("backward") == 2 * 4 * pairs * 2 * (3 * 64 + 2 * 128)


def test_errors_survive_pickling():
    refused = refusal(facts(1), facts(2), facts(3))
    copy = pickle.loads(pickle.dumps(refused))
    assert (str(copy), copy.reasons) == (str(refused), refused.reasons)
    assert isinstance(copy, ValueError)


def test_a_problem_of_another_process_is_found_by_its_hash():
    """Strings have another hash there, so that the hash is computed anew."""
    here = problem(Sizes(2, 5, 7, 4, 2, 64, 128))
    program = (
        "import pickle; from tests.support.problems import Sizes, problem;"
        "p = problem(Sizes(2, 5, 7, 4, 2, 64, 128)); hash(p); print(pickle.dumps(p).hex())"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    printed = subprocess.check_output([sys.executable, "-c", program], env=environment, text=True)
    there = pickle.loads(bytes.fromhex(printed))
    assert there == here
    assert hash(there) == hash(here)


def test_facts_of_unequal_rank_are_a_bug():
    with pytest.raises(ValueError, match="differ in rank"):
        facts(1, 2, strides=(1,))


def test_a_backward_adds_operands_and_narrows_the_gradients():
    given = problem(Sizes(2, 200, 300, 6, 2, 64, 128))
    assert given.gradients == ("dq", "dk", "dv")
    dout = facts(2, 200, 6, 128, dtype="torch.bfloat16", strides=(0, 0, 0, 0))
    built = backward_problem(given, [("dout", dout)], ["dv", "dq"])
    assert built.gradients == ("dq", "dv")
    assert built.operands == (*given.operands, ("dout", dout))
    assert built.signature == given.signature
    assert backward_problem(given) == given
    moved = facts(2, 300, 2, 64, strides=(64, 128, 38400, 1))
    operands = dict(backward_problem(built, [("k", moved)]).operands)
    assert list(operands) == ["q", "k", "v", "dout"]
    assert (operands["k"], operands["dout"]) == (moved, dout)


def test_a_backward_that_does_not_fit_is_refused_with_every_reason():
    dout = facts(2, 200, 6, 64, dtype="float32", device="cuda:0")
    with pytest.raises(InvalidArgument) as refused:
        backward_problem(problem(Sizes(heads_q=6, head_dim_v=128)), [("dout", dout)], ["dq", "db"])
    assert list(refused.value.reasons) == [
        "dout has shape (2, 200, 6, 64): give (2, 200, 6, 128)",
        "dout has dtype float32: give bfloat16",
        "dout has device cuda:0: give cpu",
        "no gradient 'db': give some of dq, dk, dv",
    ]
