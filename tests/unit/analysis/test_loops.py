"""Loops of machine code, and what they cost, on a listing small enough to count by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hopperflash.analysis.loop_cost import Share, Tile, shared_steps, step_cost
from hopperflash.analysis.loops import loops_of, tensor_loops
from hopperflash.analysis.pipes import Pipe, pipe_of
from hopperflash.analysis.sass import SassListing, parse_listing
from hopperflash.plan.config import BackwardConfig
from hopperflash.plan.cost import Moved
from hopperflash.plan.units import AMPERE, HOPPER

# An outer loop (HEAD) around a loop of two GEMMs (STEP). A barrier's wait is behind the end and
# jumps back; a lane-dependent part of the step is skipped by others.
KERNEL = """
    MOV R1, c[0x0][0x28]
HEAD:
    ULDC UR4, c[0x0][0x10]
STEP:
    SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R2
    @!P0 BRA `(SPIN)
WAITED:
    WARPGROUP.ARRIVE
    HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], RZ, !UPT, gsb0
    WARPGROUP.DEPBAR.LE gsb0, 0x0
    FFMA R4, R24, R3, R5
    IMAD.MOV.U32 R5, RZ, RZ, R4
    MUFU.EX2 R4, R4
    MUFU.EX2 R6, R6
    FMNMX R7, R24, R7, !PT
    SHFL.BFLY PT, R8, R7, 0x2, 0x1f
    STS.64 [R9], R4
    STSM.16.M88.4 [R9], R4
    WARPGROUP.ARRIVE
    HGMMA.64x64x16.F32.BF16 R88, R152, gdesc[UR8].tnspB, R88, gsb0
    WARPGROUP.DEPBAR.LE gsb0, 0x0
    @P1 BRA `(SKIP)
    SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR4+0x8], RZ
SKIP:
    UIADD3 UR5, UR5, 0x1, URZ
    @P2 BRA `(STEP)
    ISETP.NE.AND P3, PT, R9, RZ, PT
    @P3 BRA `(HEAD)
    EXIT
SPIN:
    SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R2
    @!P0 BRA `(SPIN)
    BRA `(WAITED)
END:
    BRA `(END)
"""


def listing(text: str) -> SassListing:
    """A listing as nvdisasm prints it, of instructions and labels one a line."""
    lines, address = ["\t.section\t.text.kernel"], 0
    for line in filter(None, map(str.strip, text.splitlines())):
        if line.endswith(":"):
            lines.append(f".L_{line}")
            continue
        lines.append(f"        /*{address:04x}*/  {line.replace('`(', '`(.L_')} ;")
        address += 16
    return parse_listing("\n".join(lines))["kernel"]


@pytest.fixture(scope="module")
def kernel() -> SassListing:
    return listing(KERNEL)


def test_loops_are_cycles(kernel):
    """The jump back from behind the end closes no loop, and no way leads to the last one."""
    found = {
        (loop.begin // 16, loop.end // 16): len(loop.instructions) for loop in loops_of(kernel)
    }
    assert found == {(1, 23): 3, (2, 21): 20, (25, 26): 2}


def test_only_what_is_on_every_way_is_unconditional(kernel):
    (step,) = tensor_loops(kernel)
    assert step.conditional == 1
    assert step.instructions[0].opcode.startswith("SYNCS")


def test_pipes_of_the_step(kernel):
    (step,) = tensor_loops(kernel)
    assert step.pipes == {
        Pipe.TENSOR: 2,
        Pipe.MUFU: 2,
        Pipe.FMA: 2,
        Pipe.ALU: 1,
        Pipe.LSU: 3,
        Pipe.SYNC: 6,
        Pipe.BRANCH: 3,
        Pipe.UNIFORM: 1,
    }
    assert step.exponentials == 2
    assert step.tensor_shapes == {"64x128x16": 1, "64x64x16": 1}
    assert step.warpgroup_syncs == 4
    assert (step.spills, step.masks) == (0, 0)


def cost(kernel, scores=128, rates=HOPPER):
    (step,) = tensor_loops(kernel)
    return step_cost([Share(step, 4)], Tile(scores, Moved(1024, 256, 640), rates))


def test_clocks_of_the_step(kernel):
    """One warp on each sub-core: its instructions, and the operands of a warpgroup's wgmma."""
    found = cost(kernel)
    units = found.units
    assert units.tensor == 128 / 2 + 64 / 2
    assert units.mufu == 2 * 8
    assert units.issue == found.instructions == 20
    assert (units.fma, units.alu) == (1 + 2, 2)
    operands = (64 + 128) * 16 * 2 + 64 * 16 * 2
    threads = 4 * (128 + 2 * 128 + 4 * 128)  # SHFL, STS.64, STSM
    assert units.shared == (operands + threads + 1024 + 256) / 128
    assert units.l2 == 640 / 32
    assert found.tensor_shapes == {"64x128x16 SS": 1, "64x64x16 RS": 1}
    assert (found.per_score, found.always_per_score) == (20, 19)
    assert found.exponentials_beyond == 1


def test_shares_of_different_loops_are_added_up(kernel):
    (step,) = tensor_loops(kernel)
    tile = Tile(256, Moved(0, 0, 0), HOPPER)
    both = step_cost([Share(step, 4), Share(step, 4)], tile)
    assert both == step_cost([Share(step, 8)], tile)
    assert both.units.issue == 2 * both.instructions


def test_additions_to_global_memory_pass_the_data_path():
    reduction = "REDG.E.ADD.F32x4.FTZ.RN.STRONG.GPU desc[UR4][R2.64], R152"
    plain, adding = (
        listing(KERNEL.replace("STS.64 ", f"{text}\n    STS.64 ")) for text in ("NOP", reduction)
    )
    found = [cost(kernel).units.shared for kernel in (plain, adding)]
    assert found[1] - found[0] == 4 * 512 / 128


def test_warpgroups_with_loops_of_their_own_share_steps():
    """Boundary and interior steps of one warpgroup, then those of the other."""
    step = "LOOP{0}:\n HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], RZ\n @P0 BRA `(LOOP{0})\n"
    code = listing("".join(step.format(i) for i in range(4)) + "EXIT")
    first, second, third, fourth = tensor_loops(code)
    config = BackwardConfig(64, 128, 128, 128, 2, 2, 1, 24, 240)
    assert shared_steps(config, code) == [
        [Share(first, 4), Share(third, 4)],
        [Share(second, 4), Share(fourth, 4)],
    ]
    alike = shared_steps(replace(config, dq_warpgroups=2), code)
    assert alike == [[Share(loop, 8)] for loop in (first, second, third, fourth)]


def test_a_wgmma_alone_between_fences_and_waits_is_seen(kernel):
    """Both of the kernel; with a second behind each none, though one GEMM begins before the branch
    back to the loop's start."""
    first, second = (line for line in KERNEL.splitlines() if "HGMMA" in line)
    twice = KERNEL.replace(first, f"{first}\n{first}").replace(second, f"{second}\n{second}")
    rotated = twice.replace(f"    WARPGROUP.ARRIVE\n{first}\n", "", 1)
    rotated = rotated.replace("    UIADD3", f"    WARPGROUP.ARRIVE\n{first}\n    UIADD3")
    found = [cost(listing(text)).serialised for text in (KERNEL, twice, rotated)]
    assert found == [True, False, False]


def test_masked_steps_select(kernel):
    assert not cost(kernel, scores=4 * 128).masked
    select = "FMNMX R7, R24, R7, !PT\n"
    masked = listing(KERNEL.replace(select, select + "FSEL R4, R4, -INF, P4\n" * 2))
    assert cost(masked, scores=4 * 128).name == "boundary"


def test_spills_are_counted():
    spilling = listing("LOOP:\nHGMMA.64x8x16.F32 R4, R8, gdesc[UR4], R4\nLDL R1, [R2]\n"
                       "STL [R2], R1\n@P0 BRA `(LOOP)\nEXIT")  # fmt: skip
    (loop,) = tensor_loops(spilling)
    assert loop.spills == 2


def test_ampere_multiplies_by_the_warp():
    ampere = listing("LOOP:\nHMMA.16816.F32 R4, R8, R12, R4\nLDSM.16.M88.4 R8, [R2]\n"
                     "FADD R1, R1, R2\n@P0 BRA `(LOOP)\nEXIT")  # fmt: skip
    (loop,) = tensor_loops(ampere)
    units = step_cost([Share(loop, 8)], Tile(16 * 8 * 8, Moved(0, 0, 0), AMPERE)).units
    assert (units.tensor, units.fma, units.shared) == (8 * 2, 2 * 2, 8 * 4)


@pytest.mark.parametrize(
    ("opcode", "pipe"),
    [
        ("F2FP.BF16.F32.PACK_AB", Pipe.ALU),
        ("UTMALDG.4D", Pipe.TMA),
        ("USETMAXREG.DEALLOC.CTAPOOL", Pipe.SYNC),
        ("USEL", Pipe.UNIFORM),
        ("FMNMX.NAN", Pipe.ALU),
        ("VIADD", Pipe.ALU),
        ("LDS.64", Pipe.LSU),
        ("FROBNICATE", Pipe.OTHER),
    ],
)
def test_pipe_of(opcode, pipe):
    assert pipe_of(opcode) is pipe
