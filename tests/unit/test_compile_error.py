"""A kernel that does not compile: one error with what the compiler said and for what."""

from __future__ import annotations

import pytest

from hopperflash.errors import CompileError
from hopperflash.plan import arch_of, make_plan
from hopperflash.runtime import compile as compile_module
from tests.support.problems import problem


@pytest.mark.parametrize(
    "fault", [ImportError("no module named cutlass"), ValueError("tile_m is 7")]
)
def test_the_error_names_the_cause_the_kernel_and_the_way_out(monkeypatch, fault):
    def fail(spec):
        raise fault

    (call,) = make_plan(problem(), arch_of("sm_90a")).calls
    monkeypatch.setattr(compile_module, "_compiled", fail)
    with pytest.raises(CompileError) as refused:
        compile_module.compile_anew(call.spec)
    assert refused.value.headline == "ForwardSm90 did not compile for sm_90a:"
    cause, kernel, way_out = refused.value.reasons
    assert cause == f"{type(fault).__name__}: {fault}"
    assert kernel == f"the kernel: {call.spec}"
    assert "hopperflash doctor" in way_out
    assert refused.value.__cause__ is fault
