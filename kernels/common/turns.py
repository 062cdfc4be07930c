"""The order in which CTAs add to a query tile's dQ, for bitwise equal sums in every run.

A counter per query tile, given by its address, holds the next turn; a CTA's turn is its place, in
the order of the launch, among the key tiles that the queries see.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32, Int64

from hopperflash.problem.mask import MaskKind

from .band import Band, visible_keys
from .tiles import KeyTile


@cute.jit
def turn_of(
    tile: KeyTile,
    m_block: Int32,
    band: Band,
    tile_m: Constexpr[int],
    tile_n: Constexpr[int],
):
    """The place of a CTA among those that add to a query tile.

    Full and window: the visible key tiles in ascending order. Causal: from the diagonal down.
    """
    turn = tile.n_block
    seqlens = tile.sequence.seqlens
    if cutlass.const_expr(band.causal):
        last_key = (m_block + 1) * tile_m - 1 + seqlens.k - seqlens.q
        last_key = min(last_key, seqlens.k - 1)
        turn = last_key // tile_n - tile.n_block
    if cutlass.const_expr(band.window):
        first_key = visible_keys(band, m_block * tile_m, seqlens).begin
        turn = tile.n_block - first_key // tile_n
    return turn


def in_descending_order(band_kind: MaskKind, in_order: bool) -> bool:
    """Whether late key tiles start first.

    Nobody may wait for a CTA that has not started, so turns follow the launch. Causal and in order:
    late keys first, since few queries see them.
    """
    return in_order and band_kind is MaskKind.CAUSAL


def heads_take_turns(band_kind: MaskKind, in_order: bool) -> bool:
    """Whether tiles of several heads are numbered together: where those of a head differ in what
    they cost, and nobody waits for a neighbour."""
    return band_kind is MaskKind.CAUSAL and not in_order


@cute.jit
def wait_for_turn(counter: Int64, turn: Int32):
    """Spin until `counter` is `turn`; what the earlier CTAs added is then visible."""
    seen = Int32(-1)
    while seen != turn:
        seen = load_acquire(counter)


@cute.jit
def pass_turn(counter: Int64):
    """Let the next CTA add; called by one thread, after the additions are complete."""
    cute.arch.inline_ptx("red.release.gpu.global.add.s32 [{$r0}], 1;", read_only_args=[counter])


@cute.jit
def load_acquire(address: Int64):
    """ld.acquire.gpu of an int32."""
    return cute.arch.inline_ptx(
        "ld.acquire.gpu.global.s32 {$w0}, [{$r0}];",
        write_only_types=[Int32],
        read_only_args=[address],
    )
