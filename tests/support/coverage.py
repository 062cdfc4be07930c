"""What the emulator executes and what it refuses, as the page docs/emulator_coverage.md.

`python -m tests.support.coverage` writes the page anew; a test holds it against the opcode tables.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from hopperflash.emulator.ops_carry import CARRY_ROWS
from hopperflash.emulator.ops_convert import PACKING
from hopperflash.emulator.ops_elementwise import ELEMENTWISE

PAGE = Path(__file__).parents[2] / "docs" / "emulator_coverage.md"


class Family(NamedTuple):
    """Instructions of one kind, the test that shows them right, and examples of every form."""

    name: str
    forms: str
    shown_by: str
    examples: tuple[str, ...]


D4 = "{%r1, %r2, %r3, %r4}"

FAMILIES = [
    Family(
        "wgmma", "m64nNk8/16/32; f16, bf16, tf32, e4m3, e5m2, s8, u8; f32, f16, s32 accumulators; A from"
        " shared memory or registers; K- and MN-major; no, 32-, 64-, 128-byte swizzle; scale-d, negation; satfinite",
        "unit/emulator/test_wgmma_ptx.py", (
            f"wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {D4}, %d1, %d2, %p1, 1, -1, 1, 1",
            f"wgmma.mma_async.sync.aligned.m64n8k8.f32.tf32.tf32 {D4}, {D4}, %d2, %p1, 1, 1",
            "wgmma.mma_async.sync.aligned.m64n8k32.f16.e4m3.e5m2 {%r1, %r2}, %d1, %d2, 1, 1, 1",
            "wgmma.fence.sync.aligned", "wgmma.commit_group.sync.aligned",
            "wgmma.wait_group.sync.aligned 1",
        ),
    ),
    Family(
        "mma.sync", "m16n8k4/k8/k16/k32; f16, bf16, tf32, s8, u8, e4m3, e5m2; f32, f16, s32 accumulators;"
        " satfinite", "unit/emulator/test_mma.py", (
            f"mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {D4}, {D4}, {{%r5, %r6}}, {D4}",
            f"mma.sync.aligned.m16n8k32.row.col.satfinite.s32.u8.s8.s32 {D4}, {D4}, {{%r5, %r6}}, {D4}",
        ),
    ),
    Family(
        "ldmatrix, stmatrix", "m8n8 x1, x2, x4, each with .trans", "unit/emulator/test_memory_ops.py", (
            f"ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {D4}, [%r5]",
            "stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r5], {%r1}",
        ),
    ),
    Family(
        "ld, st", "b8 to b64, v2 and v4, global, shared, shared::cluster, local, const, param and generic;"
        " cache and eviction modifiers, .nc, .volatile, .relaxed, .acquire, .release; lanes may name"
        " different memories and CTAs", "unit/emulator/test_memory_ops.py", (
            "ld.global.nc.L1::no_allocate.L2::128B.v4.f32 {%r1, %r2, %r3, %r4}, [%d1+16]",
            "ld.acquire.gpu.global.u64 %d1, [%d2]", "ld.shared::cluster.u32 %r1, [%r2]",
            "ldu.global.b32 %r1, [%d1]", "st.global.cs.v2.b64 [%d1], {%d2, %d3}",
            "st.release.gpu.b32 [%d1], %r1",
        ),
    ),
    Family(
        "atom, red", "add, min, max, and, or, xor, exch, cas, inc, dec on 16 to 64 bits, f16, bf16, f16x2,"
        " bf16x2, f32, f64, v2 and v4; global, shared, shared::cluster and generic",
        "unit/emulator/test_memory_ops.py", (
            "atom.global.cas.b64 %d1, [%d2], %d3, %d4",
            "atom.relaxed.cluster.shared::cluster.add.u32 %r1, [%r2], %r3",
            "red.global.add.v4.f32 [%d1], {%r1, %r2, %r3, %r4}",
            "red.global.add.noftz.v2.bf16x2 [%d1], {%r1, %r2}",
        ),
    ),
    Family(
        "cp.async", "4, 8, 16 bytes; zero fill by size or predicate; groups; mbarrier arrival with and"
        " without .noinc", "unit/emulator/test_memory_ops.py, unit/emulator/test_async.py", (
            "cp.async.ca.shared.global [%r1], [%d1], 8, %r2",
            "cp.async.cg.shared::cta.global.L2::128B [%r1], [%d1], 16, %p1",
            "cp.async.commit_group", "cp.async.wait_group 1", "cp.async.wait_all",
            "cp.async.mbarrier.arrive.noinc.shared.b64 [%r1]",
        ),
    ),
    Family(
        "TMA tensor copies", "tiles of rank 1 to 5; load, store, reduce (add, min, max, inc, dec, and, or,"
        " xor where the type has them); multicast; cache hints; prefetch",
        "unit/emulator/test_tma_ops.py, emulated/test_conformance.py", (
            "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
            ".multicast::cluster.L2::cache_hint [%r1], [%d1, {%r2, %r3, %r4, %r5, %r6}], [%r7], %h1, %d2",
            "cp.async.bulk.tensor.1d.global.shared::cta.tile.bulk_group [%d1, {%r1}], [%r2]",
            "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group"
            " [%d1, {%r1, %r2}], [%r3]",
            "cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%d1, {%r1, %r2}]",
        ),
    ),
    Family(
        "bulk copies", "global to shared (multicast too), shared to global, shared to the shared memory of"
        " another CTA; reductions in both of the last directions",
        "unit/emulator/test_tma_ops.py, unit/emulator/test_cluster_ops.py", (
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%d1], %r2, [%r3]",
            "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
            " [%r1], [%r2], %r3, [%r4]",
            "cp.async.bulk.global.shared::cta.bulk_group [%d1], [%r1], 128",
            "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.noftz.bf16 [%d1], [%r1], 128",
            "cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.add.u32"
            " [%r1], [%r2], 128, [%r3]",
            "cp.async.bulk.commit_group", "cp.async.bulk.wait_group.read 0",
        ),
    ),
    Family(
        "tensor maps on the device", "tensormap.replace of every field, cp_fenceproxy",
        "unit/emulator/test_tma_ops.py", (
            "tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%r1], 1, %r2",
            "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned"
            " [%d1], [%r1], 128",
            "fence.proxy.tensormap::generic.acquire.gpu [%d1], 128", "prefetch.tensormap [%d1]",
        ),
    ),
    Family(
        "mbarrier", "init, inval, arrive (drop, noComplete, expect_tx, remote), expect_tx, complete_tx,"
        " test_wait and try_wait by state or parity, pending_count",
        "unit/emulator/test_barrier_ops.py, unit/emulator/test_cluster_ops.py", (
            "mbarrier.init.shared::cta.b64 [%r1], 128", "mbarrier.inval.shared.b64 [%r1]",
            "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r1], 2",
            "mbarrier.arrive.expect_tx.shared::cta.b64 %d1, [%r1], 4096",
            "mbarrier.arrive_drop.noComplete.shared.b64 %d1, [%r1], 1",
            "mbarrier.complete_tx.relaxed.cluster.shared::cluster.b64 [%r1], 16",
            "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 %p1, [%r1], %r2, %r3",
            "mbarrier.pending_count.b64 %r1, %d1",
        ),
    ),
    Family(
        "bar, barrier", "sync, arrive, red.popc/and/or over a CTA; barrier.cluster; bar.warp.sync",
        "unit/emulator/test_barrier_ops.py", (
            "bar.sync 1, 128", "barrier.cta.arrive.aligned %r1, %r2", "bar.red.popc.u32 %r1, 0, %p1",
            "barrier.cluster.arrive.relaxed.aligned", "barrier.cluster.wait.acquire.aligned",
            "bar.warp.sync %r1",
        ),
    ),
    Family(
        "clusters", "CTAs resident together; mapa, getctarank; st.async, red.async",
        "unit/emulator/test_cluster_ops.py", (
            "mapa.shared::cluster.u32 %r1, %r2, %r3", "getctarank.shared::cluster.u32 %r1, %r2",
            "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b64 [%r1], {%d1, %d2}, [%r2]",
            "red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.max.s32"
            " [%r1], %r2, [%r3]",
        ),
    ),
    Family(
        "warp-wide", "shfl, vote, match, redux, elect, activemask, all with member masks",
        "unit/emulator/test_warp.py", (
            "shfl.sync.down.b32 %r1|%p1, %r2, %r3, 31, %r4", "vote.sync.ballot.b32 %r1, %p1, -1",
            "match.all.sync.b64 %r1|%p1, %d1, -1", "redux.sync.min.s32 %r1, %r2, %r3",
            "elect.sync %r1|%p1, -1", "activemask.b32 %r1",
        ),
    ),
    Family(
        "comparisons, conversions, moves", "setp with every comparison and Boolean; cvt between integers"
        " and floats of 8 to 64 bits with rounding, saturation, relu; mov of vectors; lop3; cvta",
        "unit/emulator/test_arithmetic.py, test_conversions.py, test_rounding.py", (
            "setp.ltu.and.ftz.f32 %p1|%p2, %r1, %r2, %p3", "cvt.rna.tf32.f32 %r1, %r2",
            "cvt.rn.satfinite.e4m3x2.f32 %h1, %r1, %r2", "cvt.rzi.sat.s8.f32 %r1, %r2",
            "mov.b64 {%r1, %r2}, %d1", "lop3.b32 %r1, %r2, %r3, %r4, 0xE8",
            "cvta.to.global.u64 %d1, %d2",
        ),
    ),
    Family(
        "control", "branches with divergence and reconvergence, calls of device functions (inlined),"
        " vprintf, assertions, trap, exit", "unit/emulator/test_machine.py, unit/emulator/test_calls.py", (
            "ret", "exit", "trap",
        ),
    ),
    Family(
        "others", "fences, setmaxnreg, griddepcontrol, nanosleep, prefetches and cache policies; special"
        " registers with clock, clock64, globaltimer", "unit/emulator/test_hints.py,"
        " unit/emulator/test_hazards_limits.py", (
            "fence.proxy.async.shared::cta", "fence.mbarrier_init.release.cluster", "membar.gl",
            "setmaxnreg.inc.sync.aligned.u32 240", "griddepcontrol.wait", "nanosleep.u32 64",
            "prefetch.global.L2 [%d1]", "prefetchu.L1 [%d1]", "applypriority.global.L2::evict_normal [%d1], 128",
            "createpolicy.fractional.L2::evict_first.b64 %d1, 0f3F800000", "pmevent 1",
            "discard.global.L2 [%d1], 128",
            "mov.u64 %d1, %clock64", "mov.u32 %r1, %cluster_ctarank",
        ),
    ),
]  # fmt: skip

REFUSED = {
    "sparse wgmma": f"wgmma.mma_async.sp.sync.aligned.m64n8k32.f32.f16.f16 {D4}, %d1, %d2, %r1, 0, %p1, 1, 1, 0, 0",
    "im2col tensor copies": "cp.async.bulk.tensor.3d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes [%r1], [%d1, {%r2, %r3, %r4}], [%r5], {%h1}",
    "gather and scatter tensor copies": "cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes [%r1], [%d1, {%r2, %r3, %r4, %r5, %r6}], [%r7]",
    "mma.sync of float64, 4-bit integers and bits": "mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%d1, %d2}, {%d3}, {%d4}, {%d1, %d2}",
    "256-bit loads (sm_100)": "ld.global.v8.b32 {%r1, %r2, %r3, %r4, %r5, %r6, %r7, %r8}, [%d1]",
    "tensor memory (sm_100)": "tcgen05.wait::ld.sync.aligned",
    "multimem": "multimem.red.add.f32 [%d1], %r1",
    "texture and surface access": "tex.1d.v4.f32.s32 {%r1, %r2, %r3, %r4}, [%d1, {%r5}]",
    "float64 arithmetic with a directed rounding": "add.rz.f64 %d1, %d2, %d3",
    "4- and 6-bit floats": "cvt.rn.satfinite.e2m1x2.f32 %h1, %r1, %r2",
}  # fmt: skip


def per_lane() -> dict[str, list[str]]:
    """The rest of each opcode of the tables by its root."""
    table: dict[str, set[str]] = defaultdict(set)
    for opcode in (*ELEMENTWISE, *PACKING, *CARRY_ROWS):
        root, _, rest = opcode.partition(".")
        table[root].add(rest)
    return {root: sorted(rests) for root, rests in sorted(table.items())}


def render() -> str:
    """The page."""
    lines = [
        "# What the emulator executes",
        "",
        "Written by `python -m tests.support.coverage` from the opcode tables; a test holds it against them.",
        "An instruction that is not here is refused, with its PTX line, before anything runs.",
        "",
        "| family | forms | shown by tests/ |",
        "| --- | --- | --- |",
        *(f"| {f.name} | {f.forms} | {f.shown_by} |" for f in FAMILIES),
        "",
        "## Refused",
        "",
        "Also calls through pointers, recursive functions, module variables initialised with addresses.",
        "",
        *(f"* {name}: `{example.split()[0]}`" for name, example in REFUSED.items()),
        "",
        "## Per-lane opcodes",
        "",
        "Shown by unit/emulator/test_arithmetic.py, test_bits.py, test_carry.py, test_rounding.py and"
        " test_conversions.py.",
        "",
        *(f"* `{root}`: {' '.join(rests)}" for root, rests in per_lane().items()),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(render())
