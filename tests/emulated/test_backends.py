"""Three implementations of one definition, sm90, sm80 and cpu, each held against fp64.

Two of them then differ by no more than the sum of their bounds, so they are not compared.
"""

from __future__ import annotations

import random
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st

import hopperflash
from hopperflash import InvalidArgument, UnsupportedProblem
from tests.support.cases import check_forward
from tests.support.gradient_cases import BackwardCase, check_backward

pytestmark = [pytest.mark.emulated, pytest.mark.xdist_group("backends")]

DTYPES = ("bf16", "fp16")
HEAD_DIMS = range(8, 257, 8)
SCHEDULES = st.sampled_from(("eager", "lazy", "random"))
# Each run draws problems of its own. A failure prints the problem, and this number, which written
# here draws the whole run again.
DRAWS = random.SystemRandom().getrandbits(32)
PLACES = (("sm90", "sm_90a"), ("sm80", "sm_90a"), ("sm80", "sm_86"), ("cpu", "sm_80"))


def _attention(backend: str) -> Any:
    def attention(*operands: torch.Tensor, **options: Any) -> Any:
        return hopperflash.flash_attn_func(*operands, backend=backend, **options)

    return attention


def _check_everywhere(case: BackwardCase, schedule: str, seed: int) -> None:
    """Results and gradients of one problem by every backend, by the tolerance rule."""
    for backend, arch in PLACES:
        with hopperflash.emulate(arch, schedule=schedule, seed=seed) as run:
            check_forward(case, _attention(backend), seed=seed)
            check_backward(case, _attention(backend), seed=seed)
        assert run.hazards == []
        assert all(backend in info.kernel_name or "process" in info.kernel_name
                   for info in run.launches)  # fmt: skip
        assert bool(run.launches) == (backend != "cpu")


@st.composite
def problems(draw: st.DrawFn, head_dims: range = HEAD_DIMS, **fixed: Any) -> BackwardCase:
    """Any dense problem of a few tiles, except for what is fixed."""
    heads_k = draw(st.integers(1, 2))
    drawn = {
        "dtype": draw(st.sampled_from(DTYPES)),
        "batch": draw(st.integers(1, 2)),
        "seqlen_q": draw(st.integers(1, 200)),
        "seqlen_k": draw(st.integers(1, 200)),
        "heads_k": heads_k,
        "heads_q": heads_k * draw(st.integers(1, 3)),
        "head_dim": draw(st.sampled_from(head_dims)),
        "head_dim_v": draw(st.sampled_from(head_dims)),
        "causal": draw(st.booleans()),
        "dlse": draw(st.booleans()),
        "deterministic": draw(st.booleans()),
    }
    return BackwardCase("random", **(drawn | fixed))


def kernels_of_this_run() -> dict[str, Any]:
    """What fixes the compiled kernels, for compiling costs most; other runs take others."""
    chosen = random.Random(DRAWS)
    return {
        "head_dims": chosen.choice((range(8, 65, 8), range(72, 97, 8), range(104, 129, 8))),
        "dtype": chosen.choice(DTYPES),
        "causal": chosen.choice((False, True)),
        "deterministic": chosen.choice((False, True)),
    }


SETTINGS = {
    "deadline": None,
    "database": None,
    "phases": (Phase.generate,),
    "suppress_health_check": list(HealthCheck),
}


@pytest.mark.timeout(1200)  # of wall time, which a busy machine stretches
@hypothesis.seed(DRAWS)
@settings(max_examples=2, **SETTINGS)
@given(problems(**kernels_of_this_run()), SCHEDULES, st.integers(0, 2**16))
def test_backends_agree(case: BackwardCase, schedule: str, seed: int) -> None:
    note(f"DRAWS = {DRAWS}")
    _check_everywhere(case, schedule, seed)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@hypothesis.seed(DRAWS)
@settings(max_examples=40, **SETTINGS)
@given(problems(), SCHEDULES, st.integers(0, 2**16))
def test_backends_agree_on_many(case: BackwardCase, schedule: str, seed: int) -> None:
    note(f"DRAWS = {DRAWS}")
    _check_everywhere(case, schedule, seed)


def _operands() -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(1, 33, 1, 64).bfloat16().requires_grad_() for _ in range(3))


def test_a_backend_is_asked_for_by_context_and_by_call() -> None:
    operands = _operands()
    with hopperflash.emulate("sm_90a") as run, hopperflash.use_backend("sm80"):
        out = hopperflash.flash_attn_func(*operands)
        hopperflash.flash_attn_func(*operands, backend="sm90")
    out.sum().backward()  # where the forward ran, after the blocks have ended
    names = [info.kernel_name for info in run.launches]
    assert [name.split("_")[2] for name in names[:2]] == ["sm80", "sm90"]
    assert names[3].startswith("hopperflash_bwd_sm80")
    assert hopperflash.make_plan(*operands).backend == "cpu"


def test_what_the_asked_for_backend_cannot_do_is_refused() -> None:
    operands = _operands()
    with pytest.raises(UnsupportedProblem, match=r"sm80: arch cpu has no mma\.sync"):
        hopperflash.flash_attn_func(*operands, backend="sm80")
    with hopperflash.emulate("sm_80"):
        with pytest.raises(UnsupportedProblem, match="sm90: arch sm_80 has no wgmma"):
            hopperflash.flash_attn_func(*operands, backend="sm90")
        assert not hopperflash.supports(*operands, backend="sm90")
        assert "as asked for" in hopperflash.explain(*operands, backend="cpu")
    with pytest.raises(InvalidArgument, match="'wgmma': give one of sm90, sm80, cpu"):
        hopperflash.flash_attn_func(*operands, backend="wgmma")
    with (
        pytest.raises(InvalidArgument, match="'sm70': give one of"),
        hopperflash.use_backend("sm70"),
    ):
        pass
