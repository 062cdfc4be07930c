"""wgmma operands against the canonical layouts of the PTX ISA, element by element."""

from types import SimpleNamespace

import numpy as np
import pytest

from hopperflash.emulator import wgmma
from hopperflash.emulator.element_types import to_float32
from hopperflash.emulator.errors import InvalidDescriptor
from hopperflash.emulator.fragments import unpack_accumulator, unpack_half_accumulator

BASE = 1024
LAYOUT_CODE = {0: 0, 128: 1, 64: 2, 32: 3}


def describe(start: int, lbo: int, sbo: int, swizzle: int) -> int:
    return start >> 4 | (lbo >> 4) << 16 | (sbo >> 4) << 32 | LAYOUT_CODE[swizzle] << 62


def element_address(desc, row, k, itemsize, mn_major):
    """Byte address of one element, straight from the layout tables."""
    start, lbo, sbo, swizzle = desc
    t = 16 // itemsize
    width = max(swizzle // 16, 1)
    if mn_major and swizzle:
        logical = (row % t) * itemsize + ((row // t) % width) * 16 + (row // (t * width)) * lbo
        logical += (k % 8) * 16 * width + (k // 8) * sbo
    elif mn_major:
        logical = (row % t) * itemsize + (row // t) * sbo + (k % 8) * 16 + (k // 8) * lbo
    else:
        logical = (row % 8) * 16 * width + (row // 8) * sbo + (k % t) * itemsize
        logical += (k // t) * (16 if swizzle else lbo)
    address = start + logical
    bits = {0: 0, 32: 1, 64: 2, 128: 3}[swizzle]
    return address ^ (((address >> 7) & ((1 << bits) - 1)) << 4)


LAYOUTS = [
    # rows, itemsize, mn_major, swizzle, lbo, sbo
    (64, 2, False, 128, 16, 1024),
    (96, 2, False, 64, 16, 512),
    (80, 2, False, 32, 16, 256),
    (24, 2, False, 0, 128, 256),
    (128, 2, True, 128, 8192, 1024),
    (64, 2, True, 64, 2048, 512),
    (32, 2, True, 32, 1024, 256),
    (32, 2, True, 0, 2048, 128),
    (64, 1, False, 128, 16, 1024),
    (32, 4, False, 64, 16, 512),
]


@pytest.mark.parametrize(("rows", "itemsize", "mn_major", "swizzle", "lbo", "sbo"), LAYOUTS)
def test_operand_elements(rows, itemsize, mn_major, swizzle, lbo, sbo):
    k = 32 // itemsize
    rng = np.random.default_rng(0)
    shared = SimpleNamespace(base=BASE, data=rng.integers(0, 256, 65536, dtype=np.uint8))
    step = 32 if not mn_major and swizzle else 2 * (sbo if mn_major and swizzle else lbo)
    count = min(max(swizzle, 32) // 32, 3)
    starts = [BASE + 2048 + i * step for i in range(count)]
    descriptors = [describe(start, lbo, sbo, swizzle) for start in starts]
    bits = wgmma.operand_bits(shared, descriptors, rows, k, itemsize, mn_major)
    assert bits.shape == (rows, k * count)
    words = shared.data.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[itemsize])
    for i, start in enumerate(starts):
        offsets = wgmma.operand_offsets(
            wgmma.decode_smem_descriptor(descriptors[i]), rows, k, itemsize, mn_major
        )
        for row in range(rows):
            for column in range(k):
                desc = (start, lbo, sbo, swizzle)
                address = element_address(desc, row, column, itemsize, mn_major)
                assert offsets[row, column] == address
                assert bits[row, i * k + column] == words[(address - BASE) // itemsize]


def test_read_operand_converts():
    data = np.random.default_rng(1).integers(0, 64, 32768, np.uint8)
    shared = SimpleNamespace(base=BASE, data=data)
    for mn_major, lbo in ((False, 16), (True, 8192)):
        descriptors = [describe(BASE, lbo, 1024, 128)]
        bits = wgmma.operand_bits(shared, descriptors, 64, 16, 2, mn_major)
        for dtype in ("f16", "bf16"):
            values = wgmma.read_operand(shared, [descriptors], 64, 16, dtype, mn_major)
            assert np.array_equal(values, to_float32(np.ascontiguousarray(bits), dtype))
            twice = wgmma.read_operand(shared, [descriptors] * 2, 64, 16, dtype, mn_major)
            assert np.array_equal(twice, np.concatenate([values, values]))


def test_accumulate():
    rng = np.random.default_rng(2)
    a, b = (rng.integers(-4, 5, shape).astype(np.float32) for shape in ((64, 48), (24, 48)))
    registers = np.full((12, 128), 3, np.float32)
    wgmma.accumulate(registers, a, b)
    assert np.array_equal(unpack_accumulator(registers), a @ b.T + 3)
    wgmma.accumulate(registers, a, b, overwrite=True)
    assert np.array_equal(unpack_accumulator(registers), a @ b.T)
    integers = np.ones((12, 128), np.int32)
    wgmma.accumulate_integers(integers, a, b)
    assert np.array_equal(unpack_accumulator(integers), (a @ b.T).astype(np.int32) + 1)
    halves = np.zeros((6, 128), np.uint32)
    wgmma.accumulate_half(halves, a, b, overwrite=True)
    wgmma.accumulate_half(halves, a, b)
    result = to_float32(unpack_half_accumulator(halves), "f16")
    assert np.array_equal(result, 2 * (a @ b.T))


def test_shape_of_opcode():
    shape = wgmma.WgmmaShape.parse("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16")
    assert shape == wgmma.WgmmaShape(128, 16, "bf16", "bf16", "f32")
    assert shape.flops == 2 * 64 * 128 * 16
    for opcode in (
        "wgmma.mma_async.sync.aligned.m64n130k16.f32.bf16.bf16",
        "wgmma.mma_async.sync.aligned.m64n128k8.f32.bf16.bf16",
        "wgmma.mma_async.sp.sync.aligned.m64n128k32.f32.bf16.bf16",
    ):
        with pytest.raises(InvalidDescriptor, match="wgmma"):
            wgmma.WgmmaShape.parse(opcode)


def test_descriptor_fields_and_refusals():
    desc = describe(0x5400, 16384, 1024, 128)
    assert wgmma.decode_smem_descriptor(desc) == (0x5400, 16384, 1024, 0, 128)
    with pytest.raises(InvalidDescriptor, match="base offset 3"):
        wgmma.decode_smem_descriptor(desc | 3 << 49)
    shared = SimpleNamespace(base=BASE, data=np.zeros(4096, np.uint8))
    with pytest.raises(InvalidDescriptor, match="4096 bytes"):
        wgmma.operand_bits(shared, [desc], 64, 16, 2, False)
    with pytest.raises(InvalidDescriptor, match="16-bit"):
        wgmma.operand_offsets(wgmma.decode_smem_descriptor(desc), 64, 32, 1, True)
    with pytest.raises(InvalidDescriptor, match="differ in layout"):
        wgmma.operand_bits(shared, [desc, describe(0x400, 16, 512, 64)], 64, 16, 2, False)
