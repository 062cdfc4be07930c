"""The backward as autograd sees it: which gradients, which cotangents, what is saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import combinations

import pytest
import torch
from torch import Tensor

import hopperflash
from hopperflash.emulator import EmulationRun
from hopperflash.problem import GRADIENTS
from tests.support.cases import Inputs, make_inputs
from tests.support.gradient_cases import (
    BackwardCase,
    Cotangents,
    check_gradients,
    make_cotangents,
)

pytestmark = [pytest.mark.emulated, pytest.mark.xdist_group("bf16-64")]

SIZES = {"batch": 2, "seqlen_q": 70, "seqlen_k": 130, "heads_q": 2, "causal": True}
CASE = BackwardCase("autograd", head_dim=40, head_dim_v=64, **SIZES)
WITH_LSE = BackwardCase("autograd", head_dim=40, head_dim_v=64, dlse=True, **SIZES)
# Their P and dS go through shared memory, guarded by other barriers where dQ is not needed.
QUERY_ROWS = BackwardCase("autograd", seqlen_q=130, head_dim=192, head_dim_v=192, dtype="fp16")
SHARED_P = BackwardCase("autograd", seqlen_q=130, head_dim=256, head_dim_v=256, dtype="fp16")

SUBSETS = [names for count in (1, 2, 3) for names in combinations(GRADIENTS, count)]


def leaves(inputs: Inputs, wanted: tuple[str, ...] = GRADIENTS) -> tuple[Tensor, ...]:
    """Operands whose gradients in `wanted` are asked for."""
    return tuple(
        operand.clone().requires_grad_(name in wanted)
        for name, operand in zip(GRADIENTS, inputs, strict=True)
    )


@contextmanager
def emulated() -> Iterator[EmulationRun]:
    with hopperflash.emulate("sm_90a") as run:
        yield run
    assert run.hazards == []


def gradients_from(case: BackwardCase, dout: Tensor) -> tuple[Tensor, ...]:
    with emulated():
        operands = leaves(make_inputs(case))
        out, _ = hopperflash.flash_attn_func(*operands, **case.options)
        return torch.autograd.grad(out, operands, dout)


@pytest.mark.parametrize(
    ("case", "wanted"),
    [
        *((CASE, subset) for subset in SUBSETS),
        *(
            pytest.param(QUERY_ROWS, subset, marks=pytest.mark.xdist_group("fp16-192"))
            for subset in (("dq",), ("dv",), ("dk", "dv"))
        ),
        pytest.param(SHARED_P, ("dv",), marks=pytest.mark.xdist_group("fp16-256")),
    ],
)
def test_only_needed_gradients_are_computed(case: BackwardCase, wanted: tuple[str, ...]) -> None:
    inputs, cotangents = make_inputs(case), make_cotangents(case)
    operands = leaves(inputs, wanted)
    with emulated() as run:
        out, _ = hopperflash.flash_attn_func(*operands, **case.options)
        out.backward(cotangents.dout)
    found = {name: x.grad for name, x in zip(GRADIENTS, operands, strict=True)}
    assert tuple(name for name, x in found.items() if x is not None) == wanted
    check_gradients(case, {name: found[name] for name in wanted}, inputs, cotangents)
    names = [launch.kernel_name.split("_")[1:3] for launch in run.launches]
    after = [["bwd", "postprocess"]] if "dq" in wanted else []
    assert names == [["fwd", "sm90"], ["bwd", "preprocess"], ["bwd", "sm90"], *after]


def strided(shape: tuple[int, ...], name: str) -> Tensor:
    """A bf16 tensor of this shape whose strides are those the name tells."""
    batch, seqlen, heads, head_dim = shape

    def numbers(*sizes: int) -> Tensor:
        return torch.randn(sizes).bfloat16()

    return {
        "expanded": lambda: numbers(1, 1, 1, 1).expand(shape),
        "one row for all": lambda: numbers(1, 1, heads, head_dim).expand(shape),
        "one head for all": lambda: numbers(batch, seqlen, 1, head_dim).expand(shape),
        "heads first": lambda: numbers(batch, heads, seqlen, head_dim).transpose(1, 2),
        "head dim not last": lambda: numbers(batch, seqlen, head_dim, heads).transpose(2, 3),
        "every other element": lambda: numbers(batch, seqlen, heads, 2 * head_dim)[..., ::2],
        "every other row": lambda: numbers(batch, 2 * seqlen, heads, head_dim)[:, ::2],
        "part of a row": lambda: numbers(batch, seqlen, heads, 3 * head_dim)[..., :head_dim],
        "odd address": lambda: numbers(batch * seqlen * heads * head_dim + 1)[1:].view(shape),
    }[name]()


@pytest.mark.parametrize(
    "name",
    [
        "expanded",
        "one row for all",
        "one head for all",
        "heads first",
        "head dim not last",
        "every other element",
        "every other row",
        "part of a row",
        "odd address",
    ],
)
def test_dout_may_have_any_strides(name: str) -> None:
    shape = (CASE.batch, CASE.seqlen_q, CASE.heads_q, CASE.head_dim_v)
    dout = strided(shape, name)
    contiguous = gradients_from(CASE, dout.contiguous())
    for found, wanted in zip(gradients_from(CASE, dout), contiguous, strict=True):
        assert torch.equal(found, wanted)


def test_operands_may_have_any_strides() -> None:
    inputs, cotangents = make_inputs(CASE), make_cotangents(CASE)
    operands = [x.transpose(1, 2).contiguous().requires_grad_() for x in inputs]
    with emulated():
        out, _ = hopperflash.flash_attn_func(*(x.transpose(1, 2) for x in operands), **CASE.options)
        found = torch.autograd.grad(out, operands, cotangents.dout)
    named = {n: x.transpose(1, 2) for n, x in zip(GRADIENTS, found, strict=True)}
    check_gradients(CASE, named, inputs, cotangents)


def test_the_lse_alone_has_a_gradient() -> None:
    inputs, cotangents = make_inputs(WITH_LSE), make_cotangents(WITH_LSE)
    operands = leaves(inputs)
    with emulated():
        _, lse = hopperflash.flash_attn_func(*operands, **WITH_LSE.options)
        lse.backward(cotangents.dlse)
    found = {name: x.grad for name, x in zip(GRADIENTS, operands, strict=True)}
    nothing = Cotangents(torch.zeros_like(cotangents.dout), cotangents.dlse)
    check_gradients(WITH_LSE, found, inputs, nothing)
    assert not found["dv"].any()


def test_sums_of_both_results_have_expanded_cotangents() -> None:
    inputs = make_inputs(WITH_LSE)
    operands = leaves(inputs)
    with emulated():
        out, lse = hopperflash.flash_attn_func(*operands, **WITH_LSE.options)
        (out.sum() + lse.sum()).backward()
    found = {name: x.grad for name, x in zip(GRADIENTS, operands, strict=True)}
    ones = Cotangents(torch.ones_like(out), torch.ones_like(lse))
    check_gradients(WITH_LSE, found, inputs, ones)


def test_backward_runs_where_the_forward_ran() -> None:
    inputs, cotangents = make_inputs(CASE), make_cotangents(CASE)
    operands = leaves(inputs)
    with emulated() as run:
        out, _ = hopperflash.flash_attn_func(*operands, **CASE.options)
    assert len(run.launches) == 1
    found = torch.autograd.grad(out, operands, cotangents.dout)
    assert len(run.launches) == 4
    assert run.hazards == []
    check_gradients(CASE, dict(zip(GRADIENTS, found, strict=True)), inputs, cotangents)


def test_a_second_derivative_beside_a_first_is_refused() -> None:
    """A gradient penalty: its part of the result must not go missing."""
    operands = leaves(make_inputs(CASE))
    with emulated():
        out, _ = hopperflash.flash_attn_func(*operands, **CASE.options)
        (dq,) = torch.autograd.grad(out.sum(), operands[:1], create_graph=True)
        with pytest.raises(RuntimeError, match="differentiate twice"):
            (out.sum() + dq.square().sum()).backward()


def test_a_second_derivative_is_refused() -> None:
    operands = leaves(make_inputs(CASE))
    with emulated():
        out, _ = hopperflash.flash_attn_func(*operands, **CASE.options)
        dout = torch.ones_like(out, requires_grad=True)
        (dq,) = torch.autograd.grad(out, operands[:1], dout, create_graph=True)
        with pytest.raises(RuntimeError, match="differentiate twice"):
            dq.sum().backward()


def saved_by(case: BackwardCase, wanted: tuple[str, ...] = GRADIENTS) -> list[Tensor]:
    """What autograd keeps between forward and backward."""
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with emulated(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hopperflash.flash_attn_func(*leaves(make_inputs(case), wanted), **case.options)
    return saved


def test_five_tensors_are_saved_and_nothing_quadratic() -> None:
    q, k, v = make_inputs(CASE)
    rows = (CASE.batch, CASE.seqlen_q, CASE.heads_q)
    out_bytes = 2 * CASE.head_dim_v * CASE.batch * CASE.seqlen_q * CASE.heads_q
    saved = saved_by(CASE)
    shapes = [tuple(x.shape) for x in (q, k, v)]
    shapes += [(*rows, CASE.head_dim_v), (CASE.batch, CASE.heads_q, CASE.seqlen_q)]
    assert [tuple(x.shape) for x in saved] == shapes
    lse_bytes = 4 * CASE.batch * CASE.seqlen_q * CASE.heads_q
    assert sum(x.nbytes for x in saved) == q.nbytes + k.nbytes + v.nbytes + out_bytes + lse_bytes


def test_workspaces_grow_with_the_length_and_not_its_square() -> None:
    def workspace_bytes(seqlen: int) -> int:
        q = torch.empty(1, seqlen, 2, 64, dtype=torch.bfloat16)
        plan = hopperflash.make_plan(q, q, q, arch="sm_90a", direction="backward")
        return sum(buffer.nbytes for buffer in plan.workspaces)

    assert workspace_bytes(1 << 16) < 2.01 * workspace_bytes(1 << 15)


def test_nothing_is_saved_where_no_gradient_is_asked_for() -> None:
    assert saved_by(CASE, ()) == []
    with emulated() as run, torch.no_grad():
        out, lse = hopperflash.flash_attn_func(*leaves(make_inputs(CASE)), **CASE.options)
    assert not out.requires_grad and not lse.requires_grad
    assert len(run.launches) == 1


@pytest.mark.parametrize("spoil", [lambda q, out: q.add_(1), lambda q, out: out.mul_(2)])
def test_a_change_in_place_is_noticed(spoil: Callable[[Tensor, Tensor], Tensor]) -> None:
    q, k, v = leaves(make_inputs(CASE))
    q = q * 1
    with emulated():
        out, _ = hopperflash.flash_attn_func(q, k, v, **CASE.options)
        total = out.float().sum()
        with torch.no_grad():
            spoil(q, out)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            total.backward()


def test_gradients_of_autocast_operands_are_fp32() -> None:
    operands = [x.float().requires_grad_() for x in make_inputs(CASE)]
    cotangents = make_cotangents(CASE)
    with emulated(), torch.autocast("cpu", torch.bfloat16):
        out, _ = hopperflash.flash_attn_func(*operands, **CASE.options)
        found = torch.autograd.grad(out, operands, cotangents.dout)
    assert {x.dtype for x in found} == {torch.float32}
    named = {name: x.bfloat16() for name, x in zip(GRADIENTS, found, strict=True)}
    check_gradients(CASE, named, make_inputs(CASE), cotangents)


def test_empty_problems_have_zero_gradients_without_a_launch() -> None:
    q = torch.randn(1, 5, 2, 64).bfloat16().requires_grad_()
    k = torch.randn(1, 0, 2, 64).bfloat16().requires_grad_()
    with emulated() as run:
        out = hopperflash.flash_attn_func(q, k, k)
        out.sum().backward()
    assert run.launches == []
    assert q.grad is not None and not q.grad.any()
