"""The torch operators: what tracing, autograd, autocast and counters see of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import hopperflash
import hopperflash.ops
from hopperflash import InvalidArgument, UnsupportedProblem
from tests.support.operators import calls_of, compiled_with_counter

HEADS_Q, HEADS_K, HEAD_DIM, HEAD_DIM_V = 4, 2, 16, 24
OPERATORS = torch.ops.hopperflash
OFFSETS = (torch.tensor([0, 5, 5, 20]), torch.tensor([0, 9, 12, 30], dtype=torch.int32))
USED = torch.tensor([4, 0, 15], dtype=torch.int32)
OPTIONS = (0.3, True, 7, -1, 20.0)


def qkv(
    seqlen_q: int, seqlen_k: int, *batch: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor, Tensor]:
    shapes = (
        (*batch, seqlen_q, HEADS_Q, HEAD_DIM),
        (*batch, seqlen_k, HEADS_K, HEAD_DIM),
        (*batch, seqlen_k, HEADS_K, HEAD_DIM_V),
    )
    q, k, v = (torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes)
    return q, k, v


def detached(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.detach() for x in tensors)


def transposed(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The same values, heads before rows in memory."""
    return tuple(x.transpose(-3, -2).contiguous().transpose(-3, -2) for x in tensors)


def dense() -> dict[str, tuple[object, ...]]:
    q, k, v = transposed(*detached(*qkv(20, 30, 2)))
    out, lse = OPERATORS.fwd(q, k, v, *OPTIONS)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    memory = tuple(map(torch.empty_like, (q, k, v)))
    return {
        "fwd": (*qkv(20, 30, 2), *OPTIONS),
        "fwd_into": (torch.empty_like(out), q, k, v, *OPTIONS),
        "bwd": (dout, q, k, v, out, lse, dlse, [True, False, True], *OPTIONS),
        "bwd_into": (*memory, dout, q, k, v, out, lse, None, *OPTIONS),
    }


def packed() -> dict[str, tuple[object, ...]]:
    q, k, v = transposed(*detached(*qkv(20, 30)))
    lengths = (*OFFSETS, USED, None)
    out, lse = OPERATORS.varlen_fwd(q, k, v, *lengths, *OPTIONS)
    dout = torch.randn_like(out)
    memory = tuple(map(torch.empty_like, (q, k, v)))
    return {
        "varlen_fwd": (*qkv(20, 30), *lengths, *OPTIONS),
        "varlen_fwd_into": (torch.empty_like(out), q, k, v, *lengths, *OPTIONS),
        "varlen_bwd": (dout, q, k, v, out, lse, *lengths, None, [False, True, True], *OPTIONS),
        "varlen_bwd_into": (*memory, dout, q, k, v, out, lse, *lengths, None, *OPTIONS),
    }


@pytest.mark.parametrize("arguments", [dense, packed])
def test_every_operator_passes_torchs_own_check(arguments) -> None:
    """Schemas, aliasing, fake shapes and strides, gradients, dynamic tracing."""
    for name, values in arguments().items():
        opcheck(getattr(OPERATORS, name).default, values)


@pytest.mark.parametrize("arguments", [dense, packed])
def test_meta_tensors_give_the_shapes_and_strides_of_real_ones(arguments) -> None:
    for name, values in arguments().items():
        operator = getattr(OPERATORS, name)
        meta = [x.detach().to("meta") if isinstance(x, Tensor) else x for x in values]
        real, traced = (
            [y] if isinstance(y, Tensor) else list(y or ())
            for y in (operator(*detached_or_same(values)), operator(*meta))
        )
        assert [(x.shape, x.stride(), x.dtype) for x in traced] == [
            (x.shape, x.stride(), x.dtype) for x in real
        ]


def detached_or_same(values: tuple[object, ...]) -> list[object]:
    return [x.detach() if isinstance(x, Tensor) else x for x in values]


def dense_loss(q: Tensor, k: Tensor, v: Tensor, left: int) -> Tensor:
    out, lse = hopperflash.flash_attn_func(
        q, k, v, causal=True, window_size=(left, -1), return_lse=True
    )
    return out.float().sin().sum() + lse.clamp(min=-1e3).sum()


def packed_loss(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, longest: object) -> Tensor:
    out = hopperflash.flash_attn_varlen_func(
        q, k, v, offsets, offsets, longest, longest, causal=True
    )
    return out.float().sin().sum()


def test_lengths_and_windows_do_not_recompile_a_traced_model() -> None:
    traced, counter = compiled_with_counter(dense_loss)
    for seqlen, left in ((20, 5), (33, 6), (47, 9), (18, 2)):
        operands = qkv(seqlen, seqlen + 3, 2)
        want, got = dense_loss(*operands, left), traced(*operands, left)
        assert torch.equal(want, got)
        for one, other in zip(
            torch.autograd.grad(want, operands), torch.autograd.grad(got, operands), strict=True
        ):
            assert torch.equal(one, other)
    assert counter.frame_count == 2  # sizes as numbers, then as symbols


@pytest.mark.parametrize("longest", [int, torch.tensor])
def test_packed_lengths_do_not_recompile_a_traced_model(longest) -> None:
    traced, counter = compiled_with_counter(packed_loss)
    for lengths in ([5, 15], [7, 3, 20], [9, 9, 9, 9], [2, 2]):
        offsets = torch.tensor([0, *lengths]).cumsum(0).int()
        operands = qkv(sum(lengths), sum(lengths))
        arguments = (*operands, offsets, longest(max(lengths)))
        want, got = packed_loss(*arguments), traced(*arguments)
        assert torch.equal(want, got)
        for one, other in zip(
            torch.autograd.grad(want, operands), torch.autograd.grad(got, operands), strict=True
        ):
            assert torch.equal(one, other)
    assert counter.frame_count == 2


def test_memory_for_results_can_be_traced() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, out: Tensor, dq: Tensor) -> Tensor:
        out, lse = hopperflash.flash_attn_func(q, k, v, return_lse=True, out=out)
        hopperflash.flash_attn_backward(torch.ones_like(out), q, k, v, out, lse, dq=dq)
        return lse

    q, k, v = detached(*qkv(20, 30, 2))
    results = []
    for run in (attend, compiled_with_counter(attend)[0]):
        out, dq = q.new_zeros(2, 20, HEADS_Q, HEAD_DIM_V), torch.zeros_like(q)
        results.append((run(q, k, v, out, dq), out, dq))
    assert all(map(torch.equal, *results))
    assert results[0][2].any()


def test_memory_where_gradients_are_needed_is_refused_while_it_is_traced() -> None:
    """Else out would be a constant, and the gradients missing."""
    q, k, v = qkv(20, 30, 2)
    out = q.new_empty(2, 20, HEADS_Q, HEAD_DIM_V)
    traced, _ = compiled_with_counter(
        lambda q, k, v, out: hopperflash.flash_attn_func(q, k, v, out=out)
    )
    with pytest.raises(Exception, match="out is given, but q, k, v may need gradients"):
        traced(q, k, v, out)
    with torch.no_grad():
        assert traced(q, k, v, out) is out


def test_operands_that_do_not_fit_are_refused_while_they_are_traced() -> None:
    q, _, v = qkv(20, 30, 2)
    traced, _ = compiled_with_counter(dense_loss)
    with pytest.raises(Exception, match="head_dim of q is 16, of k 24: give equal ones"):
        traced(q, v, v, 3)


def test_options_of_another_type_can_be_traced() -> None:
    """0 for 0.0 and False, and lists."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> object:
        return hopperflash.flash_attn_func(q, k, v, 0, 1, 1, [5, 0], 30, None, 0, 0)  # type: ignore[arg-type]

    operands = qkv(20, 30, 2)
    found = compiled_with_counter(attend)[0](*operands)
    assert torch.equal(found, attend(*operands))  # type: ignore[arg-type]
    plain = {"softmax_scale": 1.0, "causal": True, "window_size": (5, 0), "softcap": 30.0}
    assert torch.equal(found, hopperflash.flash_attn_func(*operands, **plain))  # type: ignore[arg-type]


def test_what_no_operator_takes_is_refused_in_compiled_code_too() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> object:
        return hopperflash.flash_attn_func(q, k, v, dropout_p=0.5)

    torch.compiler.reset()
    with pytest.raises(UnsupportedProblem, match="dropout"):
        torch.compile(attend, backend="aot_eager")(*qkv(20, 30, 2))
    with pytest.raises(Exception, match="hopperflash refuses this: without fullgraph=True"):
        compiled_with_counter(attend)[0](*qkv(20, 30, 2))


@pytest.mark.parametrize("name", ["fwd", "varlen_fwd"])
def test_selective_checkpointing_keeps_what_it_is_told_to(name: str) -> None:
    """By the operator's name, so that its forward runs once and not once more in the backward."""
    operator = getattr(OPERATORS, name).default
    q, k, v = qkv(20, 30, 2) if name == "fwd" else qkv(20, 30)

    def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        lengths = OFFSETS if name == "varlen_fwd" else ()
        out, _ = operator(q * 1.0, k, v, *lengths)
        return out.sin()

    def forwards(**options: object) -> int:
        with calls_of(operator) as calls:
            checkpoint(block, q, k, v, use_reentrant=False, **options).sum().backward()
        return len(calls)

    assert forwards() == 2
    kept = lambda: create_selective_checkpoint_contexts([operator])  # noqa: E731
    assert forwards(context_fn=kept) == 1


def test_second_derivatives_are_refused() -> None:
    q, k, v = qkv(20, 30, 2)
    out = hopperflash.flash_attn_func(q, k, v)
    (dq,) = torch.autograd.grad(out.float().square().sum(), q, create_graph=True)
    with pytest.raises(UnsupportedProblem, match="cannot differentiate twice"):
        torch.autograd.backward(dq.sum())


def test_forward_mode_derivatives_are_refused() -> None:
    """Else they would be 0."""
    q, k, v = detached(*qkv(20, 30, 2))
    with pytest.raises(UnsupportedProblem, match="no forward-mode derivatives"):
        torch.func.jvp(lambda x: hopperflash.flash_attn_func(x, k, v), (q,), (q,))
    with forward_ad.dual_level():
        assert hopperflash.flash_attn_func(q, k, v).shape == (2, 20, HEADS_Q, HEAD_DIM_V)
        with pytest.raises(UnsupportedProblem, match="no forward-mode derivatives"):
            hopperflash.flash_attn_func(forward_ad.make_dual(q, q), k, v)


def test_compiled_code_asks_for_a_backend_when_it_runs() -> None:
    """In its backward too."""
    operands = qkv(20, 30, 2)
    traced, _ = compiled_with_counter(hopperflash.flash_attn_func)
    with hopperflash.use_backend("cpu"):
        out = traced(*operands)
    with (
        hopperflash.use_backend("sm80"),
        pytest.raises(UnsupportedProblem, match="backend sm80 does not compute this backward"),
    ):
        out.sum().backward()


def test_a_mask_of_gradients_has_three_entries() -> None:
    arguments = dense()["bwd"]
    with pytest.raises(InvalidArgument, match=r"output_mask is .*: give three, of dq, dk, dv"):
        OPERATORS.bwd(*arguments[:7], [True, False])


def test_what_is_saved_grows_linearly() -> None:
    saved: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        saved.append(x)
        return x

    q, k, v = qkv(300, 300, 1)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out, lse = hopperflash.flash_attn_func(q, k, v, return_lse=True)
    assert sum(x.nbytes for x in saved) == sum(x.nbytes for x in (q, k, v, out, lse))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_what_is_fp32(dtype: torch.dtype) -> None:
    operands = qkv(20, 30, 2, dtype=torch.float32)
    with torch.autocast("cpu", dtype=dtype):
        out, lse = hopperflash.flash_attn_func(*operands, return_lse=True)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    out.float().sum().backward()
    assert all(x.grad is not None and x.grad.dtype == torch.float32 for x in operands)
    want = hopperflash.flash_attn_func(*(x.detach().to(dtype) for x in operands))
    assert torch.equal(out, want)
    with pytest.raises(InvalidArgument, match="q is float32"):
        hopperflash.flash_attn_func(*operands)


@pytest.mark.parametrize("is_causal", [False, True])
def test_flops_are_counted_as_torch_counts_its_own(is_causal: bool) -> None:
    q, k, v = (torch.randn(2, 30, HEADS_Q, HEAD_DIM).bfloat16().requires_grad_() for _ in "qkv")
    with FlopCounterMode(display=False) as ours:
        hopperflash.flash_attn_func(q, k, v, causal=is_causal).sum().backward()
    heads_first = [x.transpose(1, 2).to("meta").detach().requires_grad_() for x in (q, k, v)]
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    with FlopCounterMode(display=False) as theirs:
        flash(*heads_first, 0.0, is_causal)[0].sum().backward()
    assert ours.get_total_flops() == theirs.get_total_flops() > 0


def test_flops_of_packed_sequences_are_those_of_each() -> None:
    q, k, v = qkv(20, 30)
    with FlopCounterMode(display=False) as counter:
        hopperflash.flash_attn_varlen_func(q, k, v, *OFFSETS, 20, 30).sum().backward()
    pairs = 5 * 9 + 0 * 3 + 15 * 18
    per_pair = 2 * ((HEAD_DIM + HEAD_DIM_V) + (3 * HEAD_DIM + 2 * HEAD_DIM_V))
    assert counter.get_total_flops() == HEADS_Q * pairs * per_pair


@pytest.mark.parametrize("where", [FakeTensorMode, lambda: torch.device("meta")])
def test_flops_of_packed_sequences_are_counted_without_their_lengths(where) -> None:
    with where(), FlopCounterMode(display=False) as counter:
        rows, offsets = torch.empty(30, HEADS_Q, HEAD_DIM).half(), torch.empty(4).int()
        hopperflash.flash_attn_varlen_func(rows, rows, rows, offsets, offsets, 30, 30)
    assert counter.get_total_flops() == HEADS_Q * (3 * 10 * 10) * 2 * (2 * HEAD_DIM)


def test_packed_sequences_are_planned_without_their_values() -> None:
    with FakeTensorMode():
        rows, offsets = torch.empty(30, HEADS_Q, HEAD_DIM).half(), torch.empty(4).int()
        lengths = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
        assert hopperflash.make_plan(rows, rows, rows, **lengths).problem.sequences == 3


def test_deterministic_mode_of_torch_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    compute = hopperflash.ops.kernels.compute
    monkeypatch.setattr(
        hopperflash.ops.kernels,
        "compute",
        lambda call: asked.append((call.direction, call.problem.deterministic)) or compute(call),
    )
    try:
        for mode in (False, True):
            torch.use_deterministic_algorithms(mode)
            hopperflash.flash_attn_func(*qkv(20, 30, 2)).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert asked == [
        ("forward", False),
        ("backward", False),
        ("forward", True),
        ("backward", True),
    ]
