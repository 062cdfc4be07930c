"""PyTorch's flash attention operators, served by the cpu backend: what arrives and what returns."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import _registry, current_flash_attention_impl, list_flash_attention_impls
from torch.nn.attention.varlen import AuxRequest, varlen_attn, varlen_attn_out

import hopperflash
from hopperflash.integrations import aten
from hopperflash.integrations.torch import fallbacks, override_operators, served
from tests.support.torch_attention import (
    CU_SEQLENS,
    activated,
    assert_equal,
    heads_first,
    packed,
    with_gradients,
)

ROOT = Path(__file__).parents[3]
flash = torch.ops.aten
sdpa = torch.nn.functional.scaled_dot_product_attention

CPU_FORWARD = "_scaled_dot_product_flash_attention_for_cpu"
CPU_BACKWARD = f"{CPU_FORWARD}_backward"


@pytest.fixture
def active() -> Iterator[None]:
    with activated():
        yield


@pytest.fixture
def served_by_cpu() -> Iterator[None]:
    """Active, and asked to compute on CPU tensors as well."""
    with activated(), hopperflash.use_backend("cpu"):
        yield


def ours(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """`flash_attn_func` of SDPA's operands."""
    out = hopperflash.flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), **options)
    assert isinstance(out, Tensor)
    return out.transpose(1, 2)


def test_importing_registers_and_only_the_user_activates() -> None:
    assert "hopperflash" in list_flash_attention_impls()
    assert current_flash_attention_impl() is None
    with activated():
        assert current_flash_attention_impl() == "hopperflash"
    assert current_flash_attention_impl() is None


def test_activating_prints_no_warning() -> None:
    code = (
        "import warnings, torch, hopperflash.integrations.torch;"
        "warnings.simplefilter('error');"
        "torch.nn.attention.activate_flash_attention_impl('hopperflash')"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "")


def test_operators_that_this_torch_has_not_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = aten.Operator("_attention_of_tomorrow", aten.OPERATORS[0].request)
    adapter = hopperflash.integrations.torch
    monkeypatch.setattr(adapter, "OPERATORS", (unknown, *aten.OPERATORS))
    with activated():
        varlen_attn(*(packed() for _ in range(3)), CU_SEQLENS, CU_SEQLENS, 30, 30)
    assert served()


def test_removing_brings_back_the_kernels_of_torch() -> None:
    operands = heads_first(), heads_first(heads=2), heads_first(heads=2)
    options = {"is_causal": True, "enable_gqa": True}
    before = with_gradients(sdpa, operands, **options)
    handle = override_operators()
    with hopperflash.use_backend("cpu"):
        during = with_gradients(sdpa, operands, **options)
        handle.remove()
        assert_equal(with_gradients(sdpa, operands, **options), before)
    assert served() == {CPU_FORWARD: 1, CPU_BACKWARD: 1}
    assert any(not torch.equal(one, other) for one, other in zip(before, during, strict=True))
    with pytest.raises(NotImplementedError, match="Could not run"):
        flash._scaled_dot_product_flash_attention(*operands)


@pytest.mark.usefixtures("served_by_cpu")
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("causal", [True, False])
def test_sdpa_and_its_gradients_are_served(causal: bool, scale: float | None) -> None:
    operands = heads_first(), heads_first(heads=2), heads_first(heads=2)
    found = with_gradients(sdpa, operands, is_causal=causal, scale=scale, enable_gqa=True)
    assert_equal(found, with_gradients(ours, operands, causal=causal, softmax_scale=scale))
    assert served() == {CPU_FORWARD: 1, CPU_BACKWARD: 1}
    assert not fallbacks()


@pytest.mark.usefixtures("served_by_cpu")
def test_autocast_is_that_of_sdpa() -> None:
    operands = tuple(heads_first().float() for _ in range(3))
    with torch.autocast("cpu", torch.bfloat16):
        found = with_gradients(sdpa, operands)
    out, *gradients = with_gradients(ours, tuple(x.bfloat16() for x in operands))
    assert_equal(found, (out, *(x.float() for x in gradients)))
    assert served() == {CPU_FORWARD: 1, CPU_BACKWARD: 1}


def test_compiled_and_checkpointed_code_reaches_the_operators() -> None:
    def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(q * 2, k, v, is_causal=True) + 1

    def checkpointed(*leaves: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(block, *leaves, use_reentrant=False)

    operands = tuple(heads_first() for _ in range(3))
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    with_gradients(compiled, operands)  # before the operators are overridden
    with activated(), hopperflash.use_backend("cpu"):
        eager = with_gradients(block, operands)
        assert_equal(with_gradients(compiled, operands), eager)
        assert served() == {CPU_FORWARD: 2, CPU_BACKWARD: 2}
        assert_equal(with_gradients(checkpointed, operands), eager)
        assert served() == {CPU_FORWARD: 4, CPU_BACKWARD: 3}


@pytest.mark.usefixtures("served_by_cpu")
def test_the_flash_operator_aligns_causal_masks_bottom_right() -> None:
    q, k = heads_first(seqlen=5), heads_first(seqlen=3)
    out, lse, *offsets, max_q, max_k, seed, offset, mask = (
        flash._scaled_dot_product_flash_attention(q, k, k, is_causal=True)
    )
    rows = (x.transpose(1, 2) for x in (q, k, k))
    wanted, wanted_lse = hopperflash.flash_attn_func(*rows, causal=True, return_lse=True)
    assert_equal((out.transpose(1, 2), lse), (wanted, wanted_lse))
    assert not out[:, :, :2].any() and (lse[:, :, :2] == -math.inf).all()  # rows without keys
    assert (offsets, max_q, max_k) == ([None, None], 5, 3)
    assert (seed.tolist(), offset.item(), mask.numel()) == ([0, 0], 0, 0)


LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "heads first": heads_first,
    "rows first": lambda: heads_first().transpose(1, 2).contiguous().transpose(1, 2),
    "part of a row": lambda: torch.randn(2, 4, 40, 48).bfloat16()[..., 16:32],
    "head dim not last": lambda: torch.randn(2, 4, 16, 40).bfloat16().transpose(2, 3),
    "one head for all": lambda: heads_first(heads=1).expand(2, 4, 40, 16),
}


def calls_of(q: Tensor) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Every dense operator with arguments around SDPA's `q`."""
    lse = torch.randn(q.shape[:3])
    seed, offset = torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64)
    rows = q.transpose(1, 2)
    yield flash._scaled_dot_product_flash_attention_for_cpu, (q, q, q)
    yield flash._scaled_dot_product_flash_attention_for_cpu_backward, (*[q] * 5, lse, 0.0, False)
    yield flash._scaled_dot_product_flash_attention, (q, q, q)
    forward = (None, None, 40, 40, 0.0, False)
    yield (
        flash._scaled_dot_product_flash_attention_backward,
        (*[q] * 5, lse, *forward, seed, offset),
    )
    yield flash._flash_attention_forward, (rows, rows, rows, *forward, False)
    yield flash._flash_attention_backward, (*[rows] * 5, lse, *forward, seed, offset)
    yield (
        flash._flash_attention_forward_no_dropout_inplace,
        (torch.empty_like(rows), rows, rows, rows, *forward, False),
    )


@pytest.mark.usefixtures("served_by_cpu")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_results_are_laid_out_as_compiled_code_expects(layout: str) -> None:
    """Shape, strides and dtype are those of the operators' meta functions."""
    for operator, arguments in calls_of(LAYOUTS[layout]()):
        with FakeTensorMode() as mode:
            fakes = [mode.from_tensor(x) if isinstance(x, Tensor) else x for x in arguments]
            expected = operator(*fakes)
        found = operator(*arguments)
        if isinstance(found, Tensor):
            found, expected = (found,), (expected,)
        for one, other in zip(found, expected, strict=True):
            if not isinstance(other, Tensor):
                assert one == other
                continue
            facts = [(x.shape, x.stride(), x.dtype) for x in (one, other)]
            assert facts[0] == facts[1], operator
    assert sum(served().values()) == len(aten.OPERATORS)


@pytest.mark.usefixtures("active")
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (7, 0), (3, 5)])
def test_varlen_attn_is_served_on_a_cpu_too(window: tuple[int, int]) -> None:
    """PyTorch has no CPU kernel for it, so nobody has to ask."""

    def torchs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return varlen_attn(
            q, k, v, CU_SEQLENS, CU_SEQLENS, 30, 30, window_size=window, scale=0.2, enable_gqa=True
        )

    def func(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return hopperflash.flash_attn_varlen_func(
            *(q, k, v, CU_SEQLENS, CU_SEQLENS, 30, 30), window_size=window, softmax_scale=0.2
        )

    operands = packed(heads=4), packed(), packed()
    assert_equal(with_gradients(torchs, operands), with_gradients(func, operands))
    assert served() == {"_flash_attention_forward": 1, "_flash_attention_backward": 1}


@pytest.mark.usefixtures("active")
def test_varlen_attn_gives_the_lse_counts_keys_and_writes_to_memory() -> None:
    q, k = packed(), packed()
    used = torch.tensor([10, 0, 20], dtype=torch.int32)
    wanted, wanted_lse = hopperflash.flash_attn_varlen_func(
        *(q, k, k, CU_SEQLENS, CU_SEQLENS, 30, 30), seqused_k=used, return_lse=True
    )
    arguments: tuple[Any, ...] = (q, k, k, CU_SEQLENS, CU_SEQLENS, 30, 30)
    options: dict[str, Any] = {"seqused_k": used, "return_aux": AuxRequest(lse=True)}
    out, lse = varlen_attn(*arguments, num_splits=1, **options)
    assert_equal((out, lse), (wanted, wanted_lse))
    memory = torch.full_like(q, math.nan)
    out, lse = varlen_attn_out(memory, *arguments, **options)
    assert out is memory
    assert_equal((out, lse), (wanted, wanted_lse))


@pytest.mark.usefixtures("active")
@pytest.mark.parametrize("bounds", [(None, None), (None, 0), (-1, 0), (4, None), (4, 2)])
def test_bounds_of_the_window_may_be_left_away(bounds: tuple[int | None, int | None]) -> None:
    q = packed(40)[None]
    out, *_ = flash._flash_attention_forward(
        *(q, q, q, None, None, 40, 40, 0.0, False, False),
        window_size_left=bounds[0],
        window_size_right=bounds[1],
    )
    assert torch.equal(out, hopperflash.flash_attn_func(q, q, q, window_size=bounds))


@pytest.mark.usefixtures("active")
@pytest.mark.parametrize("deterministic", [True, False])
def test_gradients_are_deterministic_where_torch_is_told_so(
    deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    backward = hopperflash.flash_attn_backward

    def spy(*args: Any, **options: Any) -> tuple[Tensor, ...]:
        asked.append(options["deterministic"])
        return backward(*args, **options)

    monkeypatch.setattr(aten, "flash_attn_backward", spy)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    operands = tuple(packed() for _ in range(3))
    with_gradients(
        lambda *x: varlen_attn(*x, CU_SEQLENS, CU_SEQLENS, 30, 30),
        operands,
    )
    assert asked == [deterministic]


def test_the_examples_of_the_page_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one lets a built-in name stand for hopperflash."""
    page = (ROOT / "docs" / "integrations.md").read_text()
    section = page.split("\n## PyTorch's own attention\n")[1].split("\n## ")[0]
    known = dict(_registry._FLASH_ATTENTION_IMPLS)
    monkeypatch.setattr(_registry, "_FLASH_ATTENTION_IMPLS", known)
    for example in re.findall(r"^```python\n(.*?)^```", section, re.DOTALL | re.MULTILINE):
        exec(compile(example, "integrations.md", "exec"), {})
    with activated("FA3"), hopperflash.use_backend("cpu"):
        sdpa(*(heads_first() for _ in range(3)))
    assert served() == {CPU_FORWARD: 1}


def test_sms_that_torch_leaves_free_are_left_free(
    served_by_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    margins = []
    for name in ("flash_attn_func", "flash_attn_backward"):
        function = getattr(aten, name)

        def spied(
            *operands: Tensor, function: Callable[..., Any] = function, **options: Any
        ) -> Any:
            margins.append(options["sm_margin"])
            return function(*operands, **options)

        monkeypatch.setattr(aten, name, spied)
    q, k, v = (torch.randn(1, 2, 40, 16).bfloat16().requires_grad_() for _ in "qkv")
    torch._C._set_sm_carveout_experimental(8)
    try:
        sdpa(q, k, v).sum().backward()
    finally:
        torch._C._set_sm_carveout_experimental(None)
    sdpa(q, k, v)
    assert margins == [8, 8, 0]
