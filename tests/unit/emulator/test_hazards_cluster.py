"""Shared memory of a CTA that may be gone when others of its cluster reach for it."""

from __future__ import annotations

import pytest

from tests.support.hazards import check_twins

# CTA 1 uses what CTA 0 wrote; %r5 names it in CTA 0.
START = """
    mov.u32 %r3, smem; mov.u32 %r2, %cluster_ctarank; mov.b32 %r4, 0;
    mapa.shared::cluster.u32 %r5, %r3, %r4; setp.eq.u32 %p1, %r2, 1; setp.ne.u32 %p2, %r0, 0;
    @!%p2 mbarrier.init.shared.b64 [%r3+256], 1;
    @!%p2 fence.mbarrier_init.release.cluster;
    shl.b32 %r6, %r0, 2; add.s32 %r7, %r5, %r6; add.s32 %r8, %r3, %r6; st.shared.b32 [%r8], %r0;
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    @!%p1 bra LAST;
"""
LAST = "LAST: barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
# CTA 0 arrives and leaves.
EARLY = "LAST: barrier.cluster.arrive.aligned; @!%p1 bra END; barrier.cluster.wait.aligned; END:"
READ = """
    ld.shared::cluster.b32 %r9, [%r7]; mul.wide.u32 %d4, %r0, 4; add.s64 %d5, %d0, %d4;
    st.global.b32 [%d5], %r9;
"""


@pytest.mark.parametrize(
    "access",
    [READ, "st.shared::cluster.b32 [%r7], 7;", "atom.shared::cluster.add.u32 %r9, [%r7], 1;"],
    ids=["load", "store", "atomic"],
)
def test_memory_of_a_cta_that_may_have_exited(access: str) -> None:
    check_twins(
        START + access + EARLY, START + access + LAST, "CTA of the cluster has exited",
        grid=2, cluster=2,
    )  # fmt: skip


def test_arrivals_at_a_cta_that_has_exited() -> None:
    """CTA 0 is gone once CTA 1 sees its flag in global memory: it wrote that last."""
    flag = """
        @%p1 bra WAITS; @!%p2 st.release.gpu.global.b32 [%d0], 1; ret;
    WAITS:
        nanosleep.u32 99; nanosleep.u32 99; nanosleep.u32 99; nanosleep.u32 99;
    SPIN:
        ld.acquire.gpu.global.b32 %r9, [%d0]; setp.eq.u32 %p3, %r9, 0; @%p3 bra SPIN;
        nanosleep.u32 99; nanosleep.u32 99; nanosleep.u32 99; nanosleep.u32 99;
    """
    arrive = "@!%p2 mbarrier.arrive.shared::cluster.b64 _, [%r5+256];\n"
    start = START.replace("@!%p1 bra LAST;", "")
    check_twins(
        start + flag + arrive, start + "@%p1 bra ARRIVES; bra LAST; ARRIVES:" + arrive + LAST,
        "CTA of the cluster has exited", grid=2, cluster=2,
    )  # fmt: skip
