"""The order in which CTAs add to a query tile's dQ, for bitwise equal sums in every run.

A counter per query tile holds the next turn; a CTA's turn is its place, in the order of the launch,
among the key tiles that the queries see.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32

from .key_tile import KeyTile


@cute.jit
def turn_of(
    tile: KeyTile,
    m_block: Int32,
    tile_m: Constexpr[int],
    tile_n: Constexpr[int],
    causal: Constexpr[bool],
):
    """The place of a CTA among those that add to a query tile.

    Full: all key tiles, in ascending order. Causal: the key tiles up to the diagonal, from the
    diagonal down.
    """
    turn = tile.n_block
    if cutlass.const_expr(causal):
        last_key = (m_block + 1) * tile_m - 1 + tile.seqlens.k - tile.seqlens.q
        last_key = min(last_key, tile.seqlens.k - 1)
        turn = last_key // tile_n - tile.n_block
    return turn


@cute.jit
def wait_for_turn(counter: cute.Pointer, turn: Int32):
    """Spin until `counter` is `turn`; what the earlier CTAs added is then visible."""
    seen = Int32(-1)
    while seen != turn:
        seen = load_acquire(counter)


@cute.jit
def pass_turn(counter: cute.Pointer):
    """Let the next CTA add; called by one thread, after the additions are complete."""
    cute.arch.red(counter, Int32(1), op="add", dtype="s32", sem="release", scope="gpu")


@cute.jit
def load_acquire(pointer: cute.Pointer):
    """ld.acquire.gpu of an int32."""
    return cute.arch.inline_ptx(
        "ld.acquire.gpu.global.s32 {$w0}, [{$r0}];",
        write_only_types=[Int32],
        read_only_args=[pointer.toint()],
    )


@cute.jit
def launch_order(block: Int32, in_order: Constexpr[bool], causal: Constexpr[bool]):
    """The key tile of a CTA.

    Nobody may wait for a CTA that has not started, so turns follow the launch. Causal and in order:
    late keys first, since few queries see them.
    """
    n_block = block
    if cutlass.const_expr(in_order and causal):
        n_block = cute.arch.grid_dim()[0] - 1 - block
    return n_block
