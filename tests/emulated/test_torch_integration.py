"""PyTorch's own attention executed by the Hopper kernels: SDPA, packed sequences, a ring."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention.varlen import AuxRequest, varlen_attn

import hopperflash
from hopperflash.integrations.torch import fallbacks, served
from hopperflash.problem import GRADIENTS
from tests.support.cases import check_forward, expected, make_inputs
from tests.support.gradient_cases import (
    BackwardCase,
    check_backward,
    check_gradients,
    expected_gradients,
    gradients_of,
    make_cotangents,
)
from tests.support.ring import RANKS, attend
from tests.support.tolerance import assert_close
from tests.support.torch_attention import activated, flash_operator, sdpa

pytestmark = [pytest.mark.emulated, pytest.mark.xdist_group("bf16-64")]

HEADS = {"heads_q": 4, "heads_k": 2}
SQUARE = BackwardCase("torch", seqlen_q=130, seqlen_k=130, causal=True, **HEADS)
CROSS = BackwardCase("torch", seqlen_q=130, seqlen_k=70, causal=True, **HEADS)  # empty rows
RING = BackwardCase("ring", seqlen_q=128, seqlen_k=128, causal=True)


@pytest.fixture
def active() -> Iterator[None]:
    with activated():
        yield


@pytest.mark.usefixtures("active")
def test_sdpa_runs_the_kernels_forward_and_backward() -> None:
    with hopperflash.emulate("sm_90a") as run:
        check_backward(SQUARE, sdpa)
    names = [launch.kernel_name.split("_")[1:3] for launch in run.launches]
    backward = [["bwd", "preprocess"], ["bwd", "sm90"], ["bwd", "postprocess"]]
    assert names == [["fwd", "sm90"], *backward]
    assert run.hazards == []
    assert sum(served().values()) == 2 and not fallbacks()


@pytest.mark.usefixtures("active")
def test_compiled_sdpa_runs_the_kernels() -> None:
    compiled = torch.compile(sdpa, fullgraph=True, backend="aot_eager")
    with hopperflash.emulate("sm_90a") as run:
        check_backward(SQUARE, compiled)
    assert len(run.launches) == 4 and run.hazards == []


@pytest.mark.usefixtures("active")
def test_the_operator_of_a_gpu_has_rows_without_keys() -> None:
    with hopperflash.emulate("sm_90a") as run:
        check_forward(CROSS, flash_operator)
        check_backward(CROSS, flash_operator)
    assert len(run.launches) == 5 and run.hazards == []


@pytest.mark.parametrize("emulated", ["forward", "backward"])
def test_a_backward_takes_the_results_of_either_forward(emulated: str) -> None:
    """Gradients of a forward and a backward of which one is torch's are as good as torch's own."""
    inputs, cotangents = make_inputs(SQUARE), make_cotangents(SQUARE)
    torchs = gradients_of(SQUARE, sdpa, inputs, cotangents)
    with activated():
        leaves = [x.detach().requires_grad_() for x in inputs]
        runs: dict[str, Any] = {"forward": nullcontext(), "backward": nullcontext()}
        runs[emulated] = hopperflash.emulate("sm_90a")
        with runs["forward"]:
            out, _ = sdpa(*leaves, **SQUARE.options)
        with runs["backward"]:
            found = torch.autograd.grad(out, leaves, cotangents.dout)
        assert sum(served().values()) == sum(fallbacks().values()) == 1
    want = expected_gradients(SQUARE, inputs, cotangents)
    for name, gradient in zip(GRADIENTS, found, strict=True):
        reference, terms = getattr(want.reference, name), getattr(want.terms, name)
        assert_close(gradient, reference, getattr(torchs, name), terms=terms, name=name)


@pytest.mark.usefixtures("active")
@pytest.mark.parametrize("deterministic", [True, False])
def test_gradients_are_deterministic_where_torch_is_told_so(deterministic: bool) -> None:
    """Two key tiles add to a tile of dQ: only one of the two kernels orders them."""
    torch.use_deterministic_algorithms(deterministic)
    try:
        with hopperflash.emulate("sm_90a", hazards="ordered") as run:
            gradients_of(SQUARE, sdpa, make_inputs(SQUARE), make_cotangents(SQUARE))
    finally:
        torch.use_deterministic_algorithms(False)
    assert (run.hazards == []) is deterministic


@pytest.mark.usefixtures("active")
def test_varlen_attn_runs_the_kernels_for_packed_rows() -> None:
    cu_seqlens = torch.tensor([0, 40, 40, 130], dtype=torch.int32)
    lengths = (cu_seqlens, cu_seqlens, 90, 90)
    q, k, v = (x[0].requires_grad_() for x in make_inputs(SQUARE))
    dout = make_cotangents(SQUARE).dout[0]
    options: dict[str, Any] = {"enable_gqa": True, "return_aux": AuxRequest(lse=True)}
    with hopperflash.emulate("sm_90a") as run:
        out, lse = varlen_attn(q, k, v, *lengths, window_size=(-1, 0), **options)
        gradients = torch.autograd.grad(out, (q, k, v), dout)
        wanted, wanted_lse = hopperflash.flash_attn_varlen_func(
            q, k, v, *lengths, causal=True, return_lse=True
        )
        wanted_gradients = torch.autograd.grad(wanted, (q, k, v), dout)
    found = (out, lse, *gradients)
    for one, other in zip(found, (wanted, wanted_lse, *wanted_gradients), strict=True):
        assert torch.equal(one, other)
    assert run.hazards == []
    assert served() == {"_flash_attention_forward": 1, "_flash_attention_backward": 1}


@pytest.mark.timeout(600)  # three processes on what cores there are
def test_context_parallel_sends_keys_around_a_ring(tmp_path: Path) -> None:
    """Parts that the kernels computed on two ranks are the results of one, gradients too."""
    torch.multiprocessing.spawn(attend, (RING, str(tmp_path)), nprocs=RANKS)
    found = torch.load(tmp_path / "found.pt", weights_only=False)
    inputs, cotangents = make_inputs(RING), make_cotangents(RING)
    want = expected(RING, inputs)
    assert_close(found["out"], want.out, want.low_out)
    check_gradients(RING, {name: found[name] for name in GRADIENTS}, inputs, cotangents)
    # The rank's own keys under the causal mask, then those of the other in full.
    operator = "_scaled_dot_product_flash_attention"
    assert found["served"] == {operator: 2, f"{operator}_backward": 2}
    assert found["launches"] == 8 and found["hazards"] == []
