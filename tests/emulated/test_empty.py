"""Where nothing is to be done, nothing is launched, and results are exact all the same."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import hopperflash

pytestmark = [pytest.mark.emulated, pytest.mark.xdist_group("empty")]

DENSE = {  # (batch, seqlen_q, seqlen_k)
    "no batch": (0, 4, 5),
    "no queries": (2, 0, 5),
    "no keys": (2, 4, 0),
    "neither": (2, 0, 0),
    "nothing": (0, 0, 0),
}
PACKED = {  # (rows of queries, rows of keys, their offsets)
    "no rows": (0, 0, (0, 0), (0, 0)),
    "no rows of queries": (0, 9, (0, 0, 0), (0, 4, 9)),
    "no rows of keys": (9, 0, (0, 4, 9), (0, 0, 0)),
    "no sequences": (9, 7, (0,), (0,)),
    "neither": (0, 0, (0,), (0,)),
}
ARCHS = ["cpu", "sm_90a", "sm_80"]


def leaves(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape).bfloat16().requires_grad_() for shape in shapes]


def check_nothing(operands: list[Tensor], out: Tensor, lse: Tensor, arch: str, run: Any) -> None:
    """Zeros, -inf, zero gradients and no launch; `run` is None outside of the emulator."""
    out_gradients = torch.autograd.grad((out.sum(), lse.exp().sum()), operands)
    assert not out.any()
    assert (lse == -torch.inf).all()
    for operand, gradient in zip(operands, out_gradients, strict=True):
        assert gradient.shape == operand.shape and not gradient.any()
    assert run is None or run.launches == []


def emulated(arch: str) -> Any:
    return nullcontext() if arch == "cpu" else hopperflash.emulate(arch)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("arch", ARCHS)
def test_dense(arch: str, name: str, causal: bool) -> None:
    batch, seqlen_q, seqlen_k = DENSE[name]
    operands = leaves((batch, seqlen_q, 4, 64), *[(batch, seqlen_k, 2, 64)] * 2)
    options: dict[str, Any] = {"causal": causal, "window_size": (3, -1), "softcap": 5.0}
    with emulated(arch) as run:
        out, lse = hopperflash.flash_attn_func(*operands, return_lse=True, **options)
        assert out.shape == (batch, seqlen_q, 4, 64) and lse.shape == (batch, 4, seqlen_q)
        check_nothing(operands, out, lse, arch, run)
        check_buffers(operands, out, lse, options)
        assert run is None or run.launches == []


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("arch", ARCHS)
def test_packed(arch: str, name: str) -> None:
    total_q, total_k, *offsets = PACKED[name]
    operands = leaves((total_q, 4, 64), *[(total_k, 2, 64)] * 2)
    cu_seqlens = [torch.tensor(values, dtype=torch.int32) for values in offsets]
    with emulated(arch) as run:
        out, lse = hopperflash.flash_attn_varlen_func(
            *operands, *cu_seqlens, 9, 9, return_lse=True, causal=True
        )
        assert out.shape == (total_q, 4, 64) and lse.shape == (4, total_q)
        check_nothing(operands, out, lse, arch, run)
        lengths = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), cu_seqlens, strict=True))
        check_buffers(operands, out, lse, {"causal": True, **lengths})
        assert run is None or run.launches == []


@pytest.mark.parametrize("arch", ARCHS)
def test_keys_of_no_sequence(arch: str) -> None:
    """The only sequence has no keys, though there are rows of some: the offsets alone tell."""
    operands = leaves((9, 2, 64), *[(7, 2, 64)] * 2)
    offsets = [torch.tensor(x, dtype=torch.int32) for x in ((0, 9), (0, 0))]
    with emulated(arch):
        out, lse = hopperflash.flash_attn_varlen_func(*operands, *offsets, 9, 0, return_lse=True)
        gradients = torch.autograd.grad((out.sum(), lse.exp().sum()), operands)
    assert not out.any()
    assert (lse == -torch.inf).all()
    assert not any(gradient.any() for gradient in gradients)


def check_buffers(
    operands: list[Tensor], out: Tensor, lse: Tensor, options: dict[str, Any]
) -> None:
    """Given memory is filled with zeros as well."""
    memory = {f"d{n}": torch.full_like(x, torch.nan) for n, x in zip("qkv", operands, strict=True)}
    inputs = (x.detach() for x in (out, *operands, out, lse))
    for gradient in hopperflash.flash_attn_backward(*inputs, **options, **memory):
        assert not gradient.any()


@pytest.mark.parametrize("arch", ARCHS)
def test_rows_without_keys(arch: str) -> None:
    """All rows of one sequence are masked, and some of another: only launches tell of work."""
    q, k, v = leaves((70, 2, 64), (9, 2, 64), (9, 2, 64))
    offsets_q, offsets_k = (torch.tensor(x, dtype=torch.int32) for x in ((0, 30, 70), (0, 0, 9)))
    with emulated(arch):
        out, lse = hopperflash.flash_attn_varlen_func(
            q, k, v, offsets_q, offsets_k, 40, 9, causal=True, return_lse=True
        )
        dq, dk, dv = torch.autograd.grad((out.sum(), lse[:, 61:].sum()), (q, k, v))
    assert not out[:61].any() and out[61:].any()
    assert (lse[:, :61] == -torch.inf).all() and lse[:, 61:].isfinite().all()
    assert not dq[:61].any() and dq[61:].any()
    assert all(x.isfinite().all() for x in (dq, dk, dv))
