"""From an instruction to its operations, through the opcode tables."""

from __future__ import annotations

import re

from .decode import Op, decode_elementwise, unknown
from .ops_async import ASYNC_OPS
from .ops_call import CALL_OPS
from .ops_cluster import CLUSTER_OPS
from .ops_memory import MEMORY_OPS
from .ops_sync import SYNC_OPS
from .ops_tensormap import TENSORMAP_OPS
from .ops_warp import WARP_OPS
from .ptx_ir import Instruction

# To add an opcode, add it to one of these tables or to ops_elementwise.ELEMENTWISE.
EFFECTS = {
    **MEMORY_OPS, **ASYNC_OPS, **CLUSTER_OPS, **TENSORMAP_OPS, **SYNC_OPS, **WARP_OPS, **CALL_OPS,
}  # fmt: skip

# What may follow an opcode whose decoder looks at no modifier itself: nothing else is executed.
SPELLINGS = {
    "applypriority": r"(\.global)?\.L2::evict_normal",
    "cp.async.bulk.commit_group": "",
    "cp.async.bulk.prefetch": (
        r"\.(L2\.global|tensor\.[1-5]d\.L2\.global(\.tile)?)(\.L2::cache_hint)?"
    ),
    "cp.async.bulk.wait_group": r"(\.read)?",
    "cp.async.commit_group": "",
    "cp.async.wait_all": "",
    "cp.async.wait_group": "",
    "discard": r"(\.global)?\.L2",
    "griddepcontrol": r"\.(launch_dependents|wait)",
    "nanosleep": r"\.u32",
    "pmevent": r"(\.mask)?",
    "prefetch": r"(\.(global|local))?\.(L1|L2(::evict_(last|normal))?)",
    "prefetch.tensormap": "",
    "prefetchu": r"\.L1",
    "setmaxnreg": r"\.(inc|dec)\.sync\.aligned\.u32",
    "wgmma.commit_group": r"\.sync\.aligned",
    "wgmma.fence": r"\.sync\.aligned",
    "wgmma.wait_group": r"\.sync\.aligned",
}


def decode(ins: Instruction) -> list[Op]:
    """The operations of an instruction, or UnknownInstruction."""
    elementwise = decode_elementwise(ins)
    if elementwise is not None:
        return elementwise
    parts = ins.parts
    for length in range(min(len(parts), 5), 0, -1):
        root = ".".join(parts[:length])
        decoder = EFFECTS.get(root)
        if decoder is not None:
            if not re.fullmatch(SPELLINGS.get(root, ".*"), ins.opcode[len(root) :]):
                raise unknown(ins)
            return [decoder(ins)]
    raise unknown(ins)
