"""What the loops of a kernel cost by its machine code: the clocks of each unit for one step.

The same arithmetic for every kernel, whoever wrote it: instructions come from the code, bytes that
no thread moves (TMA, cp.async) from the tile. `hopperflash.plan.cost` predicts the same figures.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from hopperflash.analysis.loops import Loop, tensor_loops
from hopperflash.analysis.pipes import Pipe
from hopperflash.analysis.sass import SassInstruction, SassListing
from hopperflash.plan.config import (
    WARPGROUP_THREADS,
    BackwardConfigSm80,
    ForwardConfig,
    ForwardConfigSm80,
    MainConfig,
)
from hopperflash.plan.cost import Gemm, Moved
from hopperflash.plan.units import (
    ALU_CLOCKS,
    HMMA_CLOCKS,
    MUFU_CLOCKS,
    SHARED_BYTES,
    SUB_CORES,
    Rates,
    UnitClocks,
)

_WARPGROUP_MMA = re.compile(r"HGMMA\.64x(\d+)x16")
_LANES = 32
_MATRIX_BYTES = 128  # 8 x 8 of 16 bits, what stmatrix and ldmatrix move at a time


@dataclass(frozen=True)
class Tile:
    """What of a kernel's configuration its machine code does not tell."""

    scores: int
    """Scores of one step, all threads together."""
    moved: Moved
    rates: Rates


@dataclass(frozen=True)
class Share:
    """The warps that run a loop; a step takes all shares of a kernel together."""

    loop: Loop
    warps: int


@dataclass(frozen=True)
class StepCost:
    """One step of a kernel as compiled."""

    begin: int
    """Address of the first instruction."""
    masked: bool
    """Whether its scores are masked."""
    instructions: float
    """Per thread, the mean over the warps."""
    per_score: float
    """Instructions over scores of a thread."""
    always_per_score: float
    """The same of those that every way through the loop takes."""
    pipes: dict[str, float]
    conditional: float
    """Instructions that some way through the loop leaves out."""
    tensor_shapes: dict[str, float]
    """Tensor-core instructions by shape and source of A: `64x128x16 RS`."""
    exponentials_beyond: float
    """Exponentials that are not of scores."""
    warpgroup_syncs: int
    serialised: bool
    """Whether there is a fence or a wait for a single wgmma."""
    spills: int
    units: UnitClocks

    @property
    def name(self) -> str:
        """Boundary steps mask, interior ones do not."""
        return "boundary" if self.masked else "interior"


def shared_steps(config: MainConfig, sass: SassListing) -> list[list[Share]]:
    """The loops of a kernel that together make up each of its steps, in order of addresses.

    Where one warpgroup computes dQ for both, each has loops of its own: first those of one, then
    in the same order those of the other.
    """
    loops = tensor_loops(sass)
    if isinstance(config, (ForwardConfigSm80, BackwardConfigSm80)):
        return [[Share(loop, config.warps)] for loop in loops]
    warps = config.consumer_warpgroups * WARPGROUP_THREADS // _LANES
    if isinstance(config, ForwardConfig) or config.dq_alike:
        return [[Share(loop, warps)] for loop in loops]
    parts = config.consumer_warpgroups
    steps = len(loops) // parts
    return [[Share(loop, warps // parts) for loop in loops[i::steps]] for i in range(steps)]


def step_cost(shares: Sequence[Share], tile: Tile) -> StepCost:
    """The cost of one step, in which each of `shares` runs its loop once."""
    warps = sum(share.warps for share in shares)

    def mean(values: Sequence[float]) -> float:
        return sum(v * s.warps for v, s in zip(values, shares, strict=True)) / warps

    loops = [share.loop for share in shares]
    per_thread = tile.scores / (_LANES * warps)
    instructions = mean([len(loop.instructions) for loop in loops])
    conditional = mean([loop.conditional for loop in loops])
    pipes = {pipe: mean([loop.pipes[pipe] for loop in loops]) for pipe in Pipe}
    shapes = sorted({_shape(i) for loop in loops for i in loop.tensor_instructions})
    return StepCost(
        begin=min(loop.begin for loop in loops),
        masked=mean([loop.masks for loop in loops]) >= per_thread / 2,
        instructions=instructions,
        per_score=instructions / per_thread,
        always_per_score=(instructions - conditional) / per_thread,
        pipes={pipe.value: count for pipe, count in pipes.items() if count},
        conditional=conditional,
        tensor_shapes={
            shape: mean([[_shape(i) for i in loop.tensor_instructions].count(shape)
                         for loop in loops])
            for shape in shapes
        },
        exponentials_beyond=mean([loop.exponentials for loop in loops]) - per_thread,
        warpgroup_syncs=max(loop.warpgroup_syncs for loop in loops),
        serialised=any(loop.serialised for loop in loops),
        spills=sum(loop.spills for loop in loops),
        units=_units(shares, tile),
    )  # fmt: skip


def _units(shares: Sequence[Share], tile: Tile) -> UnitClocks:
    def clocks(of: dict[Pipe, float]) -> float:
        """Clocks of a pipe of one sub-core, each of which has a quarter of the warps."""
        return sum(
            share.loop.pipes[pipe] * share.warps / SUB_CORES * cost
            for share in shares
            for pipe, cost in of.items()
        )

    rates = tile.rates
    multiplies = sum(_integer_multiplies(s.loop) * s.warps / SUB_CORES for s in shares)
    shared = sum(_shared_bytes(i) * s.warps for s in shares for i in s.loop.instructions)
    moved = tile.moved.into_shared + tile.moved.out_of_shared
    return UnitClocks(
        tensor=sum(
            _tensor_clocks(i) * s.warps / SUB_CORES for s in shares for i in s.loop.instructions
        ),
        mufu=clocks({Pipe.MUFU: MUFU_CLOCKS}),
        issue=clocks(dict.fromkeys(Pipe, 1)),
        fma=clocks({Pipe.FMA: rates.fma_clocks})
        + multiplies * (rates.imad_clocks - rates.fma_clocks),
        alu=clocks({Pipe.ALU: ALU_CLOCKS}),
        shared=(shared + moved) / SHARED_BYTES,
        l2=tile.moved.l2 / rates.l2_bytes,
    )


def _integer_multiplies(loop: Loop) -> int:
    return loop.count("IMAD")


def _shape(instruction: SassInstruction) -> str:
    """`64x128x16 SS`, with where A and B come from, or `16816`."""
    shape = instruction.opcode.split(".")[1]
    if not _WARPGROUP_MMA.match(instruction.opcode):
        return shape
    return f"{shape} {'RS' if _a_in_registers(instruction) else 'SS'}"


def _a_in_registers(instruction: SassInstruction) -> bool:
    """One descriptor pair stands for A and B where both are in shared memory."""
    return not instruction.operands.split(",")[1].strip().startswith("gdesc")


def _gemm(instruction: SassInstruction) -> Gemm | None:
    """A wgmma, which four warps issue together."""
    match = _WARPGROUP_MMA.match(instruction.opcode)
    if match is None:
        return None
    return Gemm("", 64, int(match[1]), 16, a_in_registers=_a_in_registers(instruction))


def _tensor_clocks(instruction: SassInstruction) -> float:
    """Clocks of one sub-core's tensor core for one warp's part."""
    gemm = _gemm(instruction)
    if gemm is not None:
        return gemm.tensor_clocks
    return HMMA_CLOCKS if instruction.opcode.startswith("HMMA") else 0


def _shared_bytes(instruction: SassInstruction) -> float:
    """Bytes' worth of the shared-memory pipe that a warp takes, without bank conflicts.

    Loads of few addresses (row statistics) and shuffles take one pass of 128 bytes. Reductions in
    global memory pass through the same data path on their way to L2.
    """
    gemm = _gemm(instruction)
    if gemm is not None:
        return gemm.bytes_read / SUB_CORES
    base, *modifiers = instruction.opcode.split(".")
    if base in ("STSM", "LDSM"):
        return _MATRIX_BYTES * next((int(m) for m in modifiers if m in ("2", "4")), 1)
    if base in ("STS", "ATOMS", "RED", "REDG"):
        return instruction.access_bytes * _LANES
    return SHARED_BYTES if base in ("LDS", "SHFL") else 0
