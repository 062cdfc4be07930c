"""Masks on an (M, N) accumulator view: keys past the end and outside the band."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32

from .band import Band, Seqlens, query_edges, visible_keys
from .layouts import mn_view
from .work import anew

_OCTET, _PAIR = 8, 2  # a thread of an accumulator has two of every eight columns
_CHUNK = 24  # columns whose bits are in one register; a shift by its whole width is undefined


@cute.jit
def mask_scores(
    acc_S: cute.Tensor,  # (MMA, MMA_M, MMA_N)
    cS: cute.Tensor,  # identity (tile_m, tile_n)
    thr_mma: cute.ThrMma,
    first_query: Int32,
    first_key: Int32,
    seqlens: Seqlens,
    band: Band,
):
    """Set the scores of invisible keys to -inf.

    How many of a row's columns come before each limit makes bits, which the compiler turns into
    predicates eight at a time: that leaves one select per score.
    """
    acc_S_mn = mn_view(acc_S)
    tScS_mn = mn_view(thr_mma.partition_C(cS))
    thread_key = first_key + tScS_mn[0, 0][1]
    for r in cutlass.range_constexpr(cute.size(acc_S_mn, mode=[0])):
        row = tScS_mn[r, 0][0]
        if cutlass.const_expr(band.group > 1):
            # The row's query is not kept: there are kernels without a register for it.
            row = anew(row)
        keys = visible_keys(band, first_query + row // band.group, seqlens)
        end = columns_before(keys.end - thread_key)
        begin = columns_before(keys.begin - thread_key)
        columns = cute.size(acc_S_mn, mode=[1])
        for first in cutlass.range_constexpr(0, columns, _CHUNK):
            visible = low_bits(end - first)
            if cutlass.const_expr(band.window):
                visible = visible & ~low_bits(begin - first)
            for i in cutlass.range_constexpr(min(_CHUNK, columns - first)):
                c = first + i
                acc_S_mn[r, c] = acc_S_mn[r, c] if visible & (1 << i) else -Float32.inf


@cute.jit
def mask_keys_past_end(
    acc_S: cute.Tensor,  # (MMA, MMA_M, MMA_N)
    cS: cute.Tensor,  # identity (tile_m, tile_n)
    thr_mma: cute.ThrMma,
    first_key: Int32,
    seqlens: Seqlens,
):
    """Set the scores of keys past the end to -inf: `mask_scores` without a band, whose rows have
    the same columns hidden."""
    acc_S_mn = mn_view(acc_S)
    tScS_mn = mn_view(thr_mma.partition_C(cS))
    # Anew in each step: bits kept from step to step would be tested one by one.
    end = columns_before(anew(seqlens.k - first_key - tScS_mn[0, 0][1]))
    columns = cute.size(acc_S_mn, mode=[1])
    for first in cutlass.range_constexpr(0, columns, _CHUNK):
        visible = low_bits(end - first)
        for i in cutlass.range_constexpr(min(_CHUNK, columns - first)):
            c = first + i
            for r in cutlass.range_constexpr(cute.size(acc_S_mn, mode=[0])):
                acc_S_mn[r, c] = acc_S_mn[r, c] if visible & (1 << i) else -Float32.inf


@cute.jit
def mask_scores_by_compares(
    acc_S: cute.Tensor,  # (MMA, MMA_M, MMA_N)
    cS: cute.Tensor,  # identity (tile_m, tile_n)
    thr_mma: cute.ThrMma,
    thr_mma_origin: cute.ThrMma,  # the slice of thread 0: its columns are compile-time constants
    first_query: Int32,
    first_key: Int32,
    seqlens: Seqlens,
    band: Band,
):
    """`mask_scores` with a compare for each score, of constants with one limit per row that is
    shifted by the thread's first column: more instructions and fewer registers."""
    acc_S_mn = mn_view(acc_S)
    tScS_mn = mn_view(thr_mma.partition_C(cS))
    t0ScS_mn = mn_view(thr_mma_origin.partition_C(cS))
    thread_key = first_key + tScS_mn[0, 0][1]
    for r in cutlass.range_constexpr(cute.size(acc_S_mn, mode=[0])):
        keys = visible_keys(band, first_query + tScS_mn[r, 0][0] // band.group, seqlens)
        begin, end = keys.begin - thread_key, keys.end - thread_key
        for c in cutlass.range_constexpr(cute.size(acc_S_mn, mode=[1])):
            column = t0ScS_mn[0, c][1]
            visible = column < end
            if cutlass.const_expr(band.window):
                visible = visible and column >= begin
            acc_S_mn[r, c] = acc_S_mn[r, c] if visible else -Float32.inf


@cute.jit
def columns_before(limit: Int32, run: Constexpr[int] = _OCTET, period: Constexpr[int] = _OCTET):
    """How many columns of a thread come before one of the tile's.

    A thread has the first two of each octet, of the octets of a run in each period, a power of 2.
    Outside the tile the count goes on, below 0 or above as many as there are.
    """
    inside = min(limit & (period - 1), run)
    pairs = (limit >> (period.bit_length() - 1)) * (run // _OCTET) + inside // _OCTET
    return pairs * _PAIR + min(inside % _OCTET, _PAIR)


def column_pattern(columns: list[int]) -> tuple[int, int]:
    """(run, period) of the columns of thread 0, which are known at compile time."""
    first = columns[::_PAIR]
    jumps = [i for i in range(1, len(first)) if first[i] - first[i - 1] != _OCTET]
    return (_OCTET * jumps[0], first[jumps[0]]) if jumps else (_OCTET, _OCTET)


@cute.jit
def low_bits(count: Int32):
    """The lowest `count` bits of a chunk; none below 0."""
    return (Int32(1) << min(max(count, 0), _CHUNK)) - 1


@cute.jit
def mask_transposed_scores(
    acc_St: cute.Tensor,  # (MMA, MMA_M, MMA_N): keys x queries
    cSt: cute.Tensor,  # identity (tile_n, tile_m)
    thr_mma: cute.ThrMma,
    thr_mma_origin: cute.ThrMma,  # the slice of thread 0: its columns are compile-time constants
    first_query: Int32,
    first_key: Int32,
    seqlens: Seqlens,
    band: Band,
):
    """Set the scores of invisible keys to -inf where keys are the rows: one range of columns each,
    empty for keys past the end.

    The range of a thread's second row begins and ends an octet later than that of its first, which
    is two of its columns if it has some of each octet: then one word serves both, if it has bits
    for all columns. Queries past the end weigh nothing, and causal they alone would see keys past
    the end.
    """
    acc_St_mn = mn_view(acc_St)
    tScSt_mn = mn_view(thr_mma.partition_C(cSt))
    t0ScSt_mn = mn_view(thr_mma_origin.partition_C(cSt))
    thread_query = first_query + tScSt_mn[0, 0][1]
    columns = cute.size(acc_St_mn, mode=[1])
    pattern = column_pattern([t0ScSt_mn[0, c][1] for c in range(columns)])
    one_word = pattern == (_OCTET, _OCTET) and columns + _PAIR <= _CHUNK
    sharers = 2 if one_word else 1
    lead = _PAIR * (sharers - 1)  # columns that the first row is ahead of the second
    for pair in cutlass.range_constexpr(0, cute.size(acc_St_mn, mode=[0]), sharers):
        keys = [first_key + tScSt_mn[pair + half, 0][0] for half in range(sharers)]
        queries = query_edges(band, keys[-1], seqlens)
        begin = columns_before(queries.begin - thread_query, *pattern)
        end = columns_before(queries.end - thread_query, *pattern)
        for first in cutlass.range_constexpr(0, columns, _CHUNK):
            word = Int32(-1)
            if cutlass.const_expr(not band.full):
                word = ~low_bits(begin - first)
            if cutlass.const_expr(band.window):
                word = word & low_bits(end - first)
            for half in cutlass.range_constexpr(sharers):
                visible = word >> (lead - _PAIR * half)
                if cutlass.const_expr(not band.causal):
                    visible = visible if keys[half] < seqlens.k else 0
                for i in cutlass.range_constexpr(min(_CHUNK, columns - first)):
                    r, c = pair + half, first + i
                    acc_St_mn[r, c] = acc_St_mn[r, c] if visible & (1 << i) else -Float32.inf


@cute.jit
def existing_keys(tScSt_mn: cute.Tensor, keys: Int32):
    """For each row of a thread all bits if its key is one of the first `keys`, else none."""
    rows = cute.size(tScSt_mn, mode=[0])
    return tuple(anew(Int32(-1) if tScSt_mn[r, 0][0] < keys else Int32(0)) for r in range(rows))


@cute.jit
def hide_keys(
    rXt: cute.Tensor,  # 16-bit A fragments ((2, 2, 2), MMA_M, K / 16): keys x queries
    existing: tuple[Int32, ...],  # `existing_keys`
):
    """Zeros for keys past the end, two values at a time, whatever was computed of them."""
    words = cute.recast_tensor(rXt, Int32)
    for r in cutlass.range_constexpr(len(existing)):
        for octet in cutlass.range_constexpr(cute.size(words, mode=[0, 2])):
            for m in cutlass.range_constexpr(cute.size(words, mode=[1])):
                for k in cutlass.range_constexpr(cute.size(words, mode=[2])):
                    place = ((0, r, octet), m, k)
                    words[place] = words[place] & existing[r]
