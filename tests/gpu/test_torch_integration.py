"""PyTorch's own attention on a GPU: selected by SDPA, served, and given back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

import hopperflash
from hopperflash.integrations.torch import fallbacks, served
from tests.support.cases import check_forward, make_inputs
from tests.support.gradient_cases import BackwardCase, check_backward
from tests.support.torch_attention import activated, flash_operator, sdpa

pytestmark = pytest.mark.gpu

HEADS: dict[str, Any] = {"heads_q": 4, "heads_k": 2}
SQUARE = BackwardCase("torch", seqlen_q=333, seqlen_k=333, causal=True, **HEADS)
CROSS = BackwardCase("torch", seqlen_q=333, seqlen_k=200, causal=True, **HEADS)
ODD = BackwardCase("torch", seqlen_q=333, seqlen_k=500, head_dim=84, head_dim_v=84)

OPERATOR = "_scaled_dot_product_flash_attention"


def on_gpu(attention: Callable[..., Any]) -> Callable[..., Any]:
    """With SDPA's choice of backend out of the way, and results brought back."""

    def attend(q: Tensor, k: Tensor, v: Tensor, /, **options: Any) -> tuple[Tensor, Any]:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out, lse = attention(*(x.cuda() for x in (q, k, v)), **options)
        return out.cpu(), None if lse is None else lse.cpu()

    return attend


@pytest.mark.parametrize("case", [SQUARE, ODD], ids=str)
def test_sdpa_is_served_and_head_dims_are_padded(case: BackwardCase) -> None:
    with activated():
        check_backward(case, on_gpu(sdpa))
    assert served() == {OPERATOR: 1, f"{OPERATOR}_backward": 1} and not fallbacks()


def test_the_operator_has_rows_without_keys() -> None:
    with activated():
        check_forward(CROSS, on_gpu(flash_operator))
        check_backward(CROSS, on_gpu(flash_operator))
    assert not fallbacks()


def test_compiled_code_reaches_the_operators() -> None:
    with activated():
        check_backward(SQUARE, on_gpu(torch.compile(sdpa, fullgraph=True)))
    assert served() == {OPERATOR: 1, f"{OPERATOR}_backward": 1}


def test_dropout_goes_to_the_kernel_of_torch_which_is_back_afterwards() -> None:
    q, k, v = (x.transpose(1, 2).cuda() for x in make_inputs(ODD))

    def attend(dropout_p: float) -> Tensor:
        torch.manual_seed(0)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p)

    alone = [attend(p) for p in (0.1, 0.0)]
    with activated():
        assert torch.equal(attend(0.1), alone[0])
        assert not served() and len(fallbacks()) == 1
        attend(0.0)
        assert served() == {OPERATOR: 1}
    assert torch.equal(attend(0.0), alone[1])


def test_varlen_attn_is_served() -> None:
    cu_seqlens = torch.tensor([0, 100, 100, 333], dtype=torch.int32, device="cuda")
    q, k, v = (x[0].cuda().requires_grad_() for x in make_inputs(SQUARE))
    lengths = (cu_seqlens, cu_seqlens, 233, 233)
    with activated():
        out = varlen_attn(q, k, v, *lengths, window_size=(-1, 0), enable_gqa=True)
        found = torch.autograd.grad(out.float().sum(), (q, k, v))
    assert served() == {"_flash_attention_forward": 1, "_flash_attention_backward": 1}
    wanted = hopperflash.flash_attn_varlen_func(q, k, v, *lengths, causal=True)
    assert torch.equal(out, wanted)
    gradients = torch.autograd.grad(wanted.float().sum(), (q, k, v))
    assert torch.equal(found[1], gradients[1]) and torch.equal(found[2], gradients[2])
    torch.testing.assert_close(found[0], gradients[0])  # dQ is added up in any order
