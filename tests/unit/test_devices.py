"""What is planned for tensors on GPUs that are not there."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import hopperflash
from hopperflash import InvalidArgument, UnsupportedProblem

CAPABILITIES = ((9, 0), (8, 6), (12, 0), (8, 0), (7, 5), (15, 0))
PROPERTIES = [
    SimpleNamespace(
        major=major, minor=minor, multi_processor_count=40 + major, L2_cache_size=1 << 24
    )
    for major, minor in CAPABILITIES
]
HOPPER, SMALL_AMPERE, BLACKWELL, AMPERE, TURING, UNKNOWN = range(len(CAPABILITIES))


class OnGpu(torch.Tensor):
    """A bf16 tensor that says it is on a GPU and has no memory; only planned with."""

    @staticmethod
    def __new__(cls, index: int, *shape: int) -> OnGpu:
        where = torch.device("cuda", index)
        return torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=torch.bfloat16, device=where, requires_grad=False
        )

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        assert func.namespace == "hopperflash", f"planning called {func}"
        on_gpu = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
        return func.redispatch(on_gpu, *args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda where: PROPERTIES[where.index])


def qkv(index: int) -> tuple[torch.Tensor, ...]:
    return OnGpu(index, 2, 100, 4, 64), OnGpu(index, 2, 200, 2, 64), OnGpu(index, 2, 200, 2, 64)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_each_call_is_planned_for_the_gpu_of_its_tensors(direction):
    """One process, several kinds of GPU, none of them first: equal problems differ by device."""
    expected = {
        HOPPER: ("sm90", "sm_90a"),
        SMALL_AMPERE: ("sm80", "sm_86"),
        BLACKWELL: ("sm80", "sm_120a"),
        AMPERE: ("sm80", "sm_80"),
    }
    for index in (SMALL_AMPERE, HOPPER, AMPERE, BLACKWELL, HOPPER, SMALL_AMPERE):
        plan = hopperflash.make_plan(*qkv(index), direction=direction)
        backend, target = expected[index]
        assert (plan.backend, plan.problem.device) == (backend, f"cuda:{index}")
        assert {call.spec.target for call in plan.calls} == {target}


def test_the_margin_is_taken_off_the_multiprocessors_of_the_device():
    q, k, v = (OnGpu(HOPPER, 8, 4096, 8, 64) for _ in "qkv")
    plan = hopperflash.make_plan(q, k, v, sm_margin=9)
    assert plan.calls[0].grid == (40, 1, 1)
    answer = hopperflash.supports(q, k, v, sm_margin=49)
    assert "sm90: sm_margin 49 leaves none of the 49 SMs to attention" in answer.reasons


def test_emulation_does_not_change_what_a_gpu_runs():
    with hopperflash.emulate("sm_80"):
        assert hopperflash.make_plan(*qkv(HOPPER)).arch.name == "sm_90a"


@pytest.mark.parametrize(
    ("index", "found"), [(TURING, "7.5: the kernels need 8.0"), (UNKNOWN, "15.0: no target for it")]
)
def test_other_gpus_are_refused_with_what_was_found_and_the_list(index, found):
    for call in (hopperflash.flash_attn_func, hopperflash.make_plan, hopperflash.explain):
        with pytest.raises(InvalidArgument) as refused:
            call(*qkv(index))
        for words in ("compute capability " + found, "sm_80, sm_86, sm_87, sm_89, sm_90a, sm_100a"):
            assert words in str(refused.value)
    assert found in hopperflash.supports(*qkv(index)).reasons[0]


def test_one_backend_is_asked_by_call_or_by_context():
    operands = qkv(HOPPER)
    assert hopperflash.make_plan(*operands, backend="sm80").backend == "sm80"
    with hopperflash.use_backend("sm80"):
        plan = hopperflash.make_plan(*operands)
        assert (plan.backend, plan.calls[0].spec.target) == ("sm80", "sm_90a")
        assert hopperflash.make_plan(*operands, backend="sm90").backend == "sm90"
        assert "as asked for" in hopperflash.explain(*operands)
    assert hopperflash.make_plan(*operands).backend == "sm90"


def test_a_backend_that_the_gpu_lacks_is_refused():
    with pytest.raises(UnsupportedProblem, match="sm90: arch sm_86 has no wgmma"):
        hopperflash.flash_attn_func(*qkv(SMALL_AMPERE), backend="sm90")
    with hopperflash.use_backend("cpu"):
        refused = hopperflash.supports(*qkv(SMALL_AMPERE))
    assert "cpu: the tensors are on cuda:1, not on the cpu" in refused.reasons


def test_without_a_margin_no_sms_are_asked_for():
    x = torch.zeros(1, 16, 1, 64, dtype=torch.bfloat16)
    refused = hopperflash.supports(x, x, x, backend="sm90")
    assert not refused
    assert not any("SMs" in reason for reason in refused.reasons)
