"""What works on a machine, found out by doing it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, get_args

from hopperflash import plan
from hopperflash.errors import CompileError, HopperflashError
from hopperflash.problem import AttnOptions, AttnProblem, Direction, OperandFacts, build_problem

TARGET = "sm_90a"
ROWS, HEAD_DIM = 16, 64


@dataclass(frozen=True)
class Ability:
    """Something the package does; `detail` is how, or why not.

    `ok` is None where it was not tried; `expected` is False where it cannot work, and nothing is
    wrong.
    """

    name: str
    ok: bool | None
    detail: str
    expected: bool = True


def compiler(tried: bool) -> Ability:
    """Where `tried` compiles one small kernel anew and executes it in the emulator."""
    name = f"compile and emulate {TARGET}"
    if not tried:
        return Ability(name, None, "left out")
    try:
        return Ability(name, True, _compile_and_emulate())
    except CompileError as broken:
        return Ability(name, False, f"{broken.headline} {broken.reasons[0]}")
    except Exception as broken:
        return Ability(name, False, f"{type(broken).__name__}: {broken}")


def computations(tried: bool) -> Iterator[Ability]:
    """What the backends do with a small problem of CPU tensors, here and in the emulator."""
    yield on_device("cpu tensors", "cpu", plan.arch_of("cpu"), tried)
    for arch in (TARGET, "sm_80"):
        yield on_device(f"emulated {arch}", "cpu", plan.arch_of(arch), False)


def on_device(name: str, device: str, arch: plan.ArchSpec, tried: bool) -> Ability:
    """Forward and backward of bf16 causal attention: who takes them, and where `tried` whether the
    results are right."""
    try:
        problem = small_problem(device)
        taken = [plan.make_plan(problem, arch, direction) for direction in get_args(Direction)]
        wrong = _wrong_results(device) if tried else []
    except HopperflashError as refused:
        return Ability(name, False, "; ".join((refused.headline, *refused.reasons)))
    except Exception as broken:
        return Ability(name, False, f"{type(broken).__name__}: {broken}")
    if wrong:
        return Ability(name, False, f"wrong results: {', '.join(wrong)}")
    backends = " and ".join(dict.fromkeys(one.backend for one in taken))
    checked = ", results checked" if tried else ""
    return Ability(name, True, f"{backends} backend, forward and backward{checked}")


def small_problem(device: str) -> AttnProblem:
    """One head of a few rows."""
    shape, strides = (1, ROWS, 1, HEAD_DIM), (ROWS * HEAD_DIM, HEAD_DIM, HEAD_DIM, 1)
    operand = OperandFacts(shape, strides, 16, "bfloat16", device)
    return build_problem(operand, operand, operand, AttnOptions(causal=True))


def _compile_and_emulate() -> str:
    """The kernel before a backward: delta = rowsum(dO o O), with ones for both."""
    import torch

    from hopperflash.runtime.compile import compile_anew
    from hopperflash.runtime.emulation import EmulationSession
    from hopperflash.runtime.tensors import allocate

    arch = plan.arch_of(TARGET)
    backward = plan.make_plan(small_problem("cpu"), arch, "backward")
    call = backward.calls[0]
    start = perf_counter()
    kernel = compile_anew(call.spec)
    compiled = perf_counter()
    ones = torch.ones(1, ROWS, 1, HEAD_DIM, dtype=torch.bfloat16)
    zeros = torch.zeros(1, 1, ROWS)
    operands: dict[str, Any] = {"out": ones, "dout": ones, "lse": zeros, "dlse": zeros}
    operands |= allocate(backward.workspaces, ones, poison=True)
    session = EmulationSession(arch, "eager", 0, "basic")
    session.launch(kernel, [operands.get(name) for name in call.operands])
    _require_equal(operands["delta"][0, 0, :ROWS].tolist(), [HEAD_DIM] * ROWS)
    return (
        f"{call.spec.ref.name} compiled in {compiled - start:.1f} s, and ran in the emulator"
        f" in {perf_counter() - compiled:.1f} s; no GPU needed"
    )


def _require_equal(found: Sequence[float], wanted: Sequence[float]) -> None:
    if list(found) != list(wanted):
        raise ArithmeticError(f"the emulated kernel computed {found}, not {wanted}")


def _wrong_results(device: str) -> list[str]:
    """Names of the results that are outside the tolerance on a device."""
    import torch

    from hopperflash import api
    from hopperflash.cli.demo_reference import Cotangents, deviations
    from hopperflash.cli.inputs import random_inputs
    from hopperflash.cli.options import SizeOptions, Sizes

    options = SizeOptions(seqlen=ROWS, heads=1, kv_heads=1, head_dim=HEAD_DIM)
    inputs = random_inputs(Sizes.of(options), 0)
    problem = small_problem("cpu")
    cotangents = Cotangents.random(problem, 0)
    q, k, v = (x.detach().to(device).requires_grad_() for x in inputs.operands)
    out, lse = api.flash_attn_func(q, k, v, causal=True, return_lse=True)
    incoming = tuple(x.to(device) for x in (cotangents.dout, cotangents.dlse))
    gradients = torch.autograd.grad((out, lse), (q, k, v), incoming)
    results = dict(zip(("O", "LSE", "dQ", "dK", "dV"), (out, lse, *gradients), strict=True))
    on_cpu = {name: x.detach().cpu() for name, x in results.items()}
    found = deviations(on_cpu, inputs, cotangents, problem)
    return [name for name, deviation in found.items() if not deviation.ok]
