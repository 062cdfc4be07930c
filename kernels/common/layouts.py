"""Views of register fragments: an accumulator as an (M, N) matrix and as an A operand."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute


def mn_layout(acc_layout: cute.Layout) -> cute.Layout:
    """((2, 2[, N/8]), MMA_M, MMA_N) -> (rows, columns) of one thread's share of an accumulator.

    The first mode of an atom's fragment is (column pair, row pair[, column octet]); the tensor-core
    generations differ only in whether the octet is part of the atom.
    """
    atom_shape, rows_shape, columns_shape = acc_layout.shape
    atom_stride, rows_stride, columns_stride = acc_layout.stride
    octet = slice(2, None)
    return cute.make_layout(
        (
            (atom_shape[1], rows_shape),
            (atom_shape[0], *atom_shape[octet], columns_shape),
        ),
        stride=(
            (atom_stride[1], rows_stride),
            (atom_stride[0], *atom_stride[octet], columns_stride),
        ),
    )


def mn_view(acc: cute.Tensor) -> cute.Tensor:
    """The (rows, columns) view of an accumulator or of its partitioned coordinates."""
    return cute.make_tensor(acc.iterator, mn_layout(acc.layout))


def operand_a_view(acc: cute.Tensor) -> cute.Tensor:
    """An accumulator as A fragments ((2, 2, 2), MMA_M, K/16) of the next GEMM, whose K is its N.

    For 16-bit operands both fragments give a thread the same elements, so no shuffle is needed: an
    A fragment spans two neighbouring column octets, which are a part of the atom's mode
    ((2, 2, N/8), MMA_M, MMA_N) or of the tile's columns ((2, 2), MMA_M, N/8).
    """
    octets_in_atom = len(acc.layout.shape[0]) == 3
    if octets_in_atom:
        divided = cute.logical_divide(acc.layout, ((None, None, 2), None, None))
        octet_pair = (divided.shape[0][2], divided.stride[0][2])
        steps = ((octet_pair[0][1], divided.shape[2]), (octet_pair[1][1], divided.stride[2]))
    else:
        divided = cute.logical_divide(acc.layout, (None, None, 2))
        octet_pair = (divided.shape[2], divided.stride[2])
        steps = (octet_pair[0][1], octet_pair[1][1])
    shape, stride = divided.shape, divided.stride
    return cute.make_tensor(
        acc.iterator,
        cute.make_layout(
            ((shape[0][0], shape[0][1], octet_pair[0][0]), shape[1], steps[0]),
            stride=((stride[0][0], stride[0][1], octet_pair[1][0]), stride[1], steps[1]),
        ),
    )


@cute.jit
def convert_operand_a(source: cute.Tensor, target: cute.Tensor):
    """fp32 A fragments ((2, 2, 2), MMA_M, K/16) to 16 bits.

    Fragment by fragment: of a vector whose length is no power of two the compiler would keep the
    halves in registers of their own and pack them between the GEMM's instructions.
    """
    for m in cutlass.range_constexpr(cute.size(target, mode=[1])):
        for k in cutlass.range_constexpr(cute.size(target, mode=[2])):
            values = source[None, m, k].load()
            target[None, m, k].store(values.to(target.element_type))
