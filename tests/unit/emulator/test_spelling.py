"""An opcode with a modifier that nobody knows is refused, not executed without it."""

from __future__ import annotations

import pytest

from hopperflash.emulator.errors import UnknownInstruction
from hopperflash.emulator.operations import EFFECTS, SPELLINGS, decode
from hopperflash.emulator.ptx_ir import Instruction
from tests.support.ptx import kernel_of

KNOWN = (
    "wgmma.fence.sync.aligned;",
    "wgmma.commit_group.sync.aligned;",
    "wgmma.wait_group.sync.aligned 0;",
    "cp.async.commit_group;",
    "cp.async.wait_group 0;",
    "cp.async.wait_all;",
    "cp.async.bulk.commit_group;",
    "cp.async.bulk.wait_group 0;",
    "cp.async.bulk.wait_group.read 0;",
    "setmaxnreg.dec.sync.aligned.u32 24;",
    "griddepcontrol.wait;",
    "griddepcontrol.launch_dependents;",
    "nanosleep.u32 20;",
    "pmevent 1;",
    "prefetch.global.L2 [%d0];",
    "prefetch.tensormap [%d0];",
    "prefetchu.L1 [%d0];",
    "applypriority.global.L2::evict_normal [%d0], 128;",
    "discard.global.L2 [%d0], 128;",
    "bar.sync 1, 128;",
    "fence.proxy.async.shared::cta;",
    "bra.uni END; END:",
    "mbarrier.init.shared.b64 [%r0], 1;",
    "elect.sync %r1|%p0, -1;",
    "shfl.sync.idx.b32 %r1, %r0, 0, 31, -1;",
    "stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r0], {%r1};",
    "st.global.b32 [%d0], %r1;",
    "ex2.approx.ftz.f32 %r1, %r1;",
    "cvt.rn.bf16x2.f32 %r1, %r1, %r2;",
    "add.s32 %r1, %r1, %r2;",
)


def instruction(text: str) -> Instruction:
    """The instruction that a kernel of this one line begins with, behind the prologue."""
    opcode = text.split()[0].rstrip(";")
    return next(ins for ins in kernel_of(text).instructions if ins.opcode == opcode)


@pytest.mark.parametrize("text", KNOWN)
def test_known_spelling_is_decoded_and_unknown_modifier_refused(text: str) -> None:
    assert decode(instruction(text))
    opcode = text.split()[0].rstrip(";")
    with pytest.raises(UnknownInstruction, match="zzz"):
        decode(instruction(text.replace(opcode, opcode + ".zzz", 1)))


def test_every_table_of_spellings_names_an_opcode() -> None:
    assert set(SPELLINGS) <= set(EFFECTS)
