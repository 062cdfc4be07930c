"""What a launch did: executed instructions, bytes moved, tensor-core work."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

_COLLECTIONS = ("ops", "classes", "shapes", "flops", "registers_set", "printed")


@dataclass
class Counters:
    """Totals; `ops` counts warp instructions per opcode root.

    Bytes are those that reach memory: what a tensor load finds outside of its tensor counts as
    nothing, and `tma_store_bytes` includes `tma_reduce_bytes`. `unique_*` counts every byte that
    a launch touches once, `global_reread_bytes` what it loads beyond that.
    """

    launches: int = 0
    ctas: int = 0
    warp_instructions: int = 0
    tma_load_bytes: int = 0
    tma_store_bytes: int = 0
    tma_reduce_bytes: int = 0
    tma_loads: int = 0
    tma_stores: int = 0
    global_load_bytes: int = 0
    global_store_bytes: int = 0
    global_atomic_bytes: int = 0
    unique_global_load_bytes: int = 0
    unique_global_store_bytes: int = 0
    global_reread_bytes: int = 0
    wgmma: int = 0
    wgmma_flops: int = 0
    mma: int = 0
    mma_flops: int = 0
    mufu: int = 0
    shared_load_bytes: int = 0
    shared_store_bytes: int = 0
    shared_bank_conflicts: int = 0
    """Extra wavefronts of ld, st, ldmatrix and stmatrix, see `bank_conflicts`."""
    mbarrier_waits: int = 0
    barrier_waits: int = 0
    cluster_waits: int = 0
    ops: dict[str, int] = field(default_factory=dict)
    classes: dict[str, int] = field(default_factory=dict)
    shapes: dict[str, int] = field(default_factory=dict)
    flops: dict[str, int] = field(default_factory=dict)
    registers_set: list[int] = field(default_factory=list)
    printed: list[str] = field(default_factory=list)
    """What vprintf wrote."""

    def add_ops(self, counts: dict[str, int], classes: dict[str, int], times: int) -> None:
        """Instructions of a segment by root and by class, executed so many times."""
        for totals, part in ((self.ops, counts), (self.classes, classes)):
            for name, count in part.items():
                totals[name] = totals.get(name, 0) + count * times

    def count_shape(self, kind: str, shape: str, count: int, flops: int) -> None:
        """Tensor-core instructions of one shape, with the FLOPs of each."""
        name = f"{kind}:{shape}"
        self.shapes[name] = self.shapes.get(name, 0) + count
        self.flops[name] = self.flops.get(name, 0) + count * flops

    def set_registers(self, count: int) -> None:
        """Record a setmaxnreg value of this launch."""
        if count not in self.registers_set:
            self.registers_set.append(count)
            self.registers_set.sort()

    def as_dict(self) -> dict[str, int]:
        """Totals by name; "op:<root>", "class:<class>", "wgmma:<shape>", "flops:wgmma:<shape>"."""
        totals = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _COLLECTIONS}
        totals.update((f"op:{name}", count) for name, count in sorted(self.ops.items()))
        totals.update((f"class:{name}", count) for name, count in sorted(self.classes.items()))
        totals.update(sorted(self.shapes.items()))
        totals.update((f"flops:{name}", count) for name, count in sorted(self.flops.items()))
        return totals
