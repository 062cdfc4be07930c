"""Executes a launch plan: on the tensors' GPU, or in the emulator."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext

import torch
from torch import Tensor

from hopperflash.plan import NOTHING, LaunchPlan
from hopperflash.runtime.compile import compile_kernel
from hopperflash.runtime.emulation import EmulationSession
from hopperflash.runtime.tensors import allocate, prepare_operands


def execute(
    plan: LaunchPlan, operands: Mapping[str, Tensor], session: EmulationSession | None
) -> dict[str, Tensor]:
    """Runs the plan's kernels in order; returns its results by name, written to where the operands
    have one of that name.

    Without a `session` they go to torch's current stream of the tensors' device and nothing
    synchronises.
    """
    like = operands["q"]
    poison = session is not None
    indirect = {copy.operand for copy in plan.copies_back}
    given = {buffer.name for buffer in plan.results if buffer.name in operands}
    allocated = [buffer for buffer in plan.results if buffer.name not in given - indirect]
    results = allocate(allocated, like, poison=poison)
    arguments = {
        **prepare_operands(plan, operands),
        **allocate(plan.workspaces, like, poison=poison),
        **results,
        **dict(plan.steps.scalars),
        NOTHING: None,
    }
    # The compiled host function launches on the current device, and on the stream of TVM-FFI's
    # environment, which follows torch's current stream of that device.
    with torch.cuda.device(like.device) if session is None else nullcontext():
        for call in plan.calls:
            kernel = compile_kernel(call.spec)
            values = [arguments[name] for name in call.operands]
            if session is None:
                kernel(*values)
            else:
                session.launch(kernel, values)
    for name in indirect:
        operands[name].copy_(results[name])
    return {**results, **{name: operands[name] for name in given}}
