"""Stand-ins for tensor arguments: kernels are compiled from signatures, never real tensors."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from hopperflash.plan.config import TILE_FIELDS
from hopperflash.problem.problem import Signature

from .dtypes import NUMERIC

_VECTOR_BYTES = 16


def vector_operand(dtype: type[cutlass.Numeric], shape: tuple[Any, ...]) -> Any:
    """A tensor whose rows TMA and 16-byte copies can address: aligned base, last stride 1, other
    strides multiples of 16 bytes."""
    step = _VECTOR_BYTES * 8 // dtype.width
    strides = tuple(cute.sym_int64(divisibility=step) for _ in shape[:-1])
    return make_fake_tensor(dtype, shape, (*strides, 1), assumed_align=_VECTOR_BYTES)


def any_shape(rank: int) -> tuple[Any, ...]:
    """A shape that no other operand shares; the last length is a multiple of 8."""
    return (*(cute.sym_int() for _ in range(rank - 1)), cute.sym_int(divisibility=8))


def integers(rank: int) -> Any:
    """A tensor of int32 of any shape."""
    shape = tuple(cute.sym_int() for _ in range(rank))
    strides = tuple(cute.sym_int64() for _ in range(rank - 1))
    return make_fake_tensor(cutlass.Int32, shape, (*strides, 1), assumed_align=4)


def tile_table() -> Any:
    """The table of the tiles of packed sequences: (tiles, fields), read 16 bytes at a time."""
    fields = len(TILE_FIELDS)
    return make_fake_tensor(
        cutlass.Int32, (cute.sym_int(), fields), (fields, 1), assumed_align=_VECTOR_BYTES
    )


def row_statistic(shape: tuple[Any, ...]) -> Any:
    """An fp32 value a row, such as the LSE."""
    strides = tuple(cute.sym_int64() for _ in shape[:-1])
    return make_fake_tensor(cutlass.Float32, shape, (*strides, 1), assumed_align=4)


def scalars() -> tuple[Any, ...]:
    """(softmax_scale, softcap, window_left, window_right, max_ctas, head_swizzle, stream) of an
    attention kernel."""
    return (
        cutlass.Float32(1.0),
        cutlass.Float32(1.0),
        cutlass.Int32(1),
        cutlass.Int32(1),
        cutlass.Int32(1),
        cutlass.Int32(1),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )


def forward_operands(signature: Signature) -> tuple[Any, ...]:
    """(q, k, v, out, lse, tiles) of a forward kernel: any lengths, head counts and strides.

    Packed tensors have a batch of 1; `tiles` is None of dense ones.
    """
    dtype = NUMERIC[signature.dtype]
    batch, heads_q, heads_k = cute.sym_int(), cute.sym_int(), cute.sym_int()
    seqlen_q, seqlen_k = cute.sym_int(), cute.sym_int()
    head_dim, head_dim_v = cute.sym_int(divisibility=8), cute.sym_int(divisibility=8)
    return (
        vector_operand(dtype, (batch, seqlen_q, heads_q, head_dim)),
        vector_operand(dtype, (batch, seqlen_k, heads_k, head_dim)),
        vector_operand(dtype, (batch, seqlen_k, heads_k, head_dim_v)),
        vector_operand(dtype, (batch, seqlen_q, heads_q, head_dim_v)),
        row_statistic((batch, heads_q, seqlen_q)),
        tile_table() if signature.packed else None,
    )


def backward_operands(signature: Signature) -> tuple[Any, ...]:
    """(q, k, v, dout, lse_log2, delta, dq_acc, dq_turn, dk, dv, tiles) of a backward kernel.

    dq_acc is in the order of the kernel: rows, or tiles.
    """
    dtype = NUMERIC[signature.dtype]
    batch, heads_q, heads_k = cute.sym_int(), cute.sym_int(), cute.sym_int()
    seqlen_q, seqlen_k = cute.sym_int(), cute.sym_int()
    head_dim, head_dim_v = cute.sym_int(divisibility=8), cute.sym_int(divisibility=8)
    padded_rows = (batch, heads_q, cute.sym_int(divisibility=4))
    k_shape = (batch, seqlen_k, heads_k, head_dim)
    v_shape = (batch, seqlen_k, heads_k, head_dim_v)
    return (
        vector_operand(dtype, (batch, seqlen_q, heads_q, head_dim)),
        vector_operand(dtype, k_shape),
        vector_operand(dtype, v_shape),
        vector_operand(dtype, (batch, seqlen_q, heads_q, head_dim_v)),
        vector_operand(cutlass.Float32, padded_rows),
        vector_operand(cutlass.Float32, padded_rows),
        vector_operand(cutlass.Float32, any_shape(4)),
        integers(3),
        vector_operand(dtype, k_shape),
        vector_operand(dtype, v_shape),
        tile_table() if signature.packed else None,
    )
