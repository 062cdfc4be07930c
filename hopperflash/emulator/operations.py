"""From an instruction to its operations, through the opcode tables."""

from __future__ import annotations

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


def decode(ins: Instruction) -> list[Op]:
    """The operations of an instruction, or UnknownInstruction."""
    elementwise = decode_elementwise(ins)
    if elementwise is not None:
        return elementwise
    parts = ins.parts
    for length in range(min(len(parts), 5), 0, -1):
        decoder = EFFECTS.get(".".join(parts[:length]))
        if decoder is not None:
            return [decoder(ins)]
    raise unknown(ins)
