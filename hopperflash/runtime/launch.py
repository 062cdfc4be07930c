"""Executes a launch plan: on the tensors' GPU, or in the emulator."""

from __future__ import annotations

import torch
from torch import Tensor

from hopperflash.plan import LaunchPlan
from hopperflash.runtime import emulation
from hopperflash.runtime.compile import compile_kernel
from hopperflash.runtime.tensors import allocate_results, prepare_operands


def execute(plan: LaunchPlan, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Runs the plan's kernels in order; returns (out, lse).

    On a GPU they go to torch's current stream of the tensors' device and nothing synchronises.
    """
    session = emulation.active()
    results = allocate_results(plan.problem, q, poison=session is not None)
    arguments = {
        **prepare_operands(plan, {"q": q, "k": k, "v": v}),
        **results,
        "softmax_scale": plan.problem.softmax_scale,
    }
    for call in plan.calls:
        kernel = compile_kernel(call.spec)
        operands = [arguments[name] for name in call.operands]
        if session is not None:
            session.launch(kernel, operands)
        else:
            # The compiled host function takes the stream from TVM-FFI's environment, which
            # follows torch's current stream of this device.
            with torch.cuda.device(q.device):
                kernel(*operands)
    return results["out"], results["lse"]
