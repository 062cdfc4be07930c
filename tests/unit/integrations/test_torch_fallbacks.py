"""What hopperflash leaves to PyTorch's own kernels: counted, explained once, or refused."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import hopperflash
from hopperflash.integrations import aten
from hopperflash.integrations.torch import fallbacks, served
from tests.support.torch_attention import (
    CU_SEQLENS,
    activated,
    assert_equal,
    heads_first,
    packed,
    with_gradients,
)

flash = torch.ops.aten
sdpa = torch.nn.functional.scaled_dot_product_attention

CPU_FORWARD = "_scaled_dot_product_flash_attention_for_cpu"


@pytest.fixture
def active() -> Iterator[None]:
    with activated():
        yield


@pytest.mark.usefixtures("active")
def test_a_call_that_nobody_computes_is_refused_with_every_reason() -> None:
    q, table = packed().float(), torch.zeros(3, 1, dtype=torch.int32)
    with pytest.raises(hopperflash.UnsupportedProblem) as refused:
        flash._flash_attention_forward(
            *(q, q, q, CU_SEQLENS, CU_SEQLENS, 30, 30, 0.0, False, False),
            alibi_slopes=torch.ones(2),
            block_table=table,
            num_splits=4,
        )
    reasons = "\n".join(refused.value.reasons)
    for part in ("alibi_slopes", "block_table", "num_splits", "q is float32", "v is float32"):
        assert part in reasons
    dense = packed()[None]
    with pytest.raises(hopperflash.UnsupportedProblem, match="seqused_k without cum_seq_k"):
        flash._flash_attention_forward(
            *(dense, dense, dense, None, None, 50, 50, 0.0, False, False), seqused_k=table[0]
        )
    with pytest.raises(hopperflash.UnsupportedProblem, match="dropout_p above 0") as refused:
        flash._scaled_dot_product_flash_attention(
            *(heads_first(head_dim=20) for _ in range(3)), 0.1, False, True
        )
    assert "return_debug_mask" in str(refused.value) and "head_dim of q is 20" in str(refused.value)


FALLBACKS: dict[str, Callable[[], tuple[tuple[Tensor, ...], dict[str, Any]]]] = {
    "attn_mask": lambda: (
        tuple(heads_first() for _ in range(3)),
        {"attn_mask": torch.ones(40, 40, dtype=torch.bool).tril()},
    ),
    "is_causal with unequal lengths": lambda: (
        (heads_first(), heads_first(seqlen=30), heads_first(seqlen=30)),
        {"is_causal": True},
    ),
    "q is float32": lambda: (tuple(heads_first().float() for _ in range(3)), {}),
    "head_dim of q is 20": lambda: (tuple(heads_first(head_dim=20) for _ in range(3)), {}),
}


@pytest.mark.parametrize("reason", FALLBACKS)
def test_the_rest_goes_to_torch_counted_and_explained_once(
    reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    operands, options = FALLBACKS[reason]()
    alone = with_gradients(sdpa, operands, **options)
    with activated(), hopperflash.use_backend("cpu"), caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert_equal(with_gradients(sdpa, operands, **options), alone)
    assert not served()
    counted = {found: n for found, n in fallbacks().items() if reason in found}
    assert list(counted.values()) == [6]
    lines = [line for line in caplog.messages if reason in line]
    assert len(lines) == 1 and "PyTorch's own kernel" in lines[0]


@pytest.mark.usefixtures("active")
def test_cpu_tensors_are_left_to_torch_unless_somebody_asks() -> None:
    operands = tuple(heads_first() for _ in range(3))
    with_gradients(sdpa, operands)
    assert not served()
    ((reason, count),) = fallbacks().items()
    assert "on the CPU" in reason and count == 2
    # A backend that cannot compute here is asked, and says why.
    with hopperflash.use_backend("sm90"):
        sdpa(*operands)
    assert not served()
    assert any(reason.startswith("sm90: ") for reason in fallbacks())


def test_counts_begin_anew_with_an_activation() -> None:
    with activated():
        sdpa(*(heads_first() for _ in range(3)))
    assert fallbacks()
    with activated():
        assert not fallbacks() and not served()


def test_a_backend_may_use_sdpa_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """What hopperflash computes with is PyTorch's own."""

    def through_sdpa(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        options["out"].copy_(sdpa(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2))
        return options["out"], torch.zeros(q.shape[0], q.shape[2], q.shape[1])

    operands = tuple(heads_first() for _ in range(3))
    alone = sdpa(*operands)
    monkeypatch.setattr(aten, "flash_attn_func", through_sdpa)
    with activated(), hopperflash.use_backend("cpu"):
        assert torch.equal(sdpa(*operands), alone)
    assert served() == {CPU_FORWARD: 1} and not fallbacks()


def test_a_kernel_of_torch_calls_kernels_of_torch() -> None:
    """On a GPU, SDPA's kernel calls the other operator: that is no call of its own."""
    library = torch.library.Library("aten", "IMPL")
    results = tuple(torch.zeros(n) for n in range(1, 6))
    library.impl("_flash_attention_forward", lambda *a, **options: results, "CPU")

    def outer(q: Tensor, k: Tensor, v: Tensor, dropout_p: float) -> tuple[Any, ...]:
        out, lse, *rest = flash._flash_attention_forward(
            *(q, k, v, None, None, 40, 40, dropout_p, False, False)
        )
        return out, lse, None, None, 40, 40, *rest

    library.impl("_scaled_dot_product_flash_attention", outer, "CPU")
    q = heads_first()
    with activated(), hopperflash.use_backend("cpu"):
        out, *_ = flash._scaled_dot_product_flash_attention(q, q, q, 0.5)
        assert torch.equal(out, results[0])
        ((reason, count),) = fallbacks().items()
        assert "dropout" in reason and count == 1 and not served()
        flash._scaled_dot_product_flash_attention(q, q, q)
        assert served() == {"_scaled_dot_product_flash_attention": 1}
