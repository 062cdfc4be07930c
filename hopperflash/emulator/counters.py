"""What a launch did: executed instructions, bytes moved, tensor-core work."""

from __future__ import annotations

from dataclasses import dataclass, field, fields


@dataclass
class Counters:
    """Totals; `ops` counts warp instructions per opcode root."""

    ctas: int = 0
    warp_instructions: int = 0
    tma_load_bytes: int = 0
    tma_store_bytes: int = 0
    tma_loads: int = 0
    tma_stores: int = 0
    global_load_bytes: int = 0
    global_store_bytes: int = 0
    wgmma: int = 0
    wgmma_flops: int = 0
    mma_flops: int = 0
    mufu: int = 0
    shared_load_bytes: int = 0
    shared_store_bytes: int = 0
    mbarrier_waits: int = 0
    ops: dict[str, int] = field(default_factory=dict)
    registers_set: list[int] = field(default_factory=list)
    printed: list[str] = field(default_factory=list)
    """What vprintf wrote."""

    def add_ops(self, counts: dict[str, int], times: int) -> None:
        for name, count in counts.items():
            self.ops[name] = self.ops.get(name, 0) + count * times

    def set_registers(self, count: int) -> None:
        """Record a setmaxnreg value of this launch."""
        if count not in self.registers_set:
            self.registers_set.append(count)
            self.registers_set.sort()

    def as_dict(self) -> dict[str, int]:
        """Totals by name; opcode counts under "op:<root>"."""
        totals = {
            f.name: getattr(self, f.name)
            for f in fields(self)
            if f.name not in ("ops", "registers_set", "printed")
        }
        totals.update((f"op:{name}", count) for name, count in sorted(self.ops.items()))
        return totals
