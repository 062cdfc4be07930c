"""Which pipe of an SM executes which machine instruction.

Sources: CUDA C++ Programming Guide, "Arithmetic Instructions" (results a clock and SM: 128 for fp32
add, multiply and FMA, 64 for integer, compare, select, min/max and pack to 16 bits, 16 for special
functions, 32 for shuffles); Nsight Compute documentation, "Pipelines" (what ALU, FMA, XU, LSU,
Uniform, CBU and Tensor take). IMAD is executed by the FMA pipe at half rate.
"""

from __future__ import annotations

from enum import Enum


class Pipe(Enum):
    """Where an instruction goes once it is issued."""

    TENSOR = "tensor"
    MUFU = "MUFU"
    FMA = "FMA"
    ALU = "ALU"
    LSU = "LSU"
    TMA = "TMA"
    UNIFORM = "uniform"
    BRANCH = "branch"
    SYNC = "sync"
    OTHER = "other"


# The first part of an opcode, or how it begins where a star ends it. The first match counts.
_PIPES: tuple[tuple[Pipe, str], ...] = (
    (Pipe.TENSOR, "HGMMA HMMA IGMMA IMMA QGMMA BGMMA BMMA DMMA"),
    (Pipe.TMA, "UTMA* UBLK*"),
    (Pipe.SYNC, "SYNCS WARPGROUP WARPGROUPSET BAR DEPBAR LDGDEPBAR WARPSYNC UCGABAR* ELECT FENCE"),
    (Pipe.SYNC, "MEMBAR ERRBAR CCTL CCTLL NANOSLEEP USETMAXREG ACQBULK PREEXIT NOP"),
    (Pipe.MUFU, "MUFU F2I FRND I2F F2F POPC FLO BREV I2I"),
    (Pipe.FMA, "FADD FMUL FFMA FSWZADD IMAD IDP HFMA2 HADD2 HMUL2"),
    (Pipe.ALU, "FMNMX FSEL FSET FSETP FCHK HMNMX2 HSET2 HSETP2 F2FP I2FP F2IP IADD3 IADD VIADD"),
    (Pipe.ALU, "VIADDMNMX VIMNMX VIMNMX3 IMNMX ISETP ISCADD IABS LEA LOP3 LOP PLOP3 SEL SHF SHL"),
    (Pipe.ALU, "SHR PRMT MOV BMSK SGXT R2P P2R CS2R VOTE VOTEU VABSDIFF LEPC"),
    (Pipe.LSU, "LDS STS LDSM STSM LDG STG LDL STL LD ST LDC LDGSTS SHFL MATCH REDUX MOVM"),
    (Pipe.LSU, "ATOM ATOMS ATOMG RED REDG S2R"),
    (Pipe.BRANCH, "BRA BRX JMP JMX EXIT CALL RET BSSY BSYNC BREAK BMOV YIELD RPCMOV KILL BPT"),
    (Pipe.UNIFORM, "R2UR S2UR U*"),
)
_EXACT = {name: pipe for pipe, names in _PIPES for name in names.split() if name[-1] != "*"}
_STARTS = [(n[:-1], pipe) for pipe, names in _PIPES for n in names.split() if n[-1] == "*"]


def pipe_of(opcode: str) -> Pipe:
    """The pipe of an opcode with or without modifiers, `Pipe.OTHER` for one not in the table."""
    base = opcode.split(".")[0]
    if base in _EXACT:
        return _EXACT[base]
    return next((pipe for start, pipe in _STARTS if base.startswith(start)), Pipe.OTHER)
