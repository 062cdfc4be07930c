"""Tensor maps against loops over single elements."""

import itertools
from typing import Any

import numpy as np
import pytest

from hopperflash.emulator import tensor_map
from hopperflash.emulator.errors import AddressError, InvalidDescriptor
from tests.support.tensor_maps import encode

STORAGE = {1: np.uint8, 2: np.uint16, 4: np.uint32}
BASE = 1024


class ArrayMemory:
    """Global memory made of one array at a made-up address."""

    def __init__(self, data: np.ndarray, address: int = 0x10000) -> None:
        self.data, self.address = data, address

    def view(self, addr: int, nbytes: int, write: bool = False) -> np.ndarray:
        start = (addr - self.address) % 2**64
        if start + nbytes > self.data.size:
            raise AddressError(f"{nbytes} bytes at {addr:#x}")
        return self.data[start : start + nbytes]

    def touch_box(self, *box: Any) -> None: ...


def random_memory(nbytes: int = 1 << 15) -> ArrayMemory:
    return ArrayMemory(np.random.default_rng(0).integers(0, 256, nbytes, dtype=np.uint8))


def box_elements(m: tensor_map.TensorMap, coords: Any) -> Any:
    """(position in the packed box, byte address or None when outside) of every element."""
    for position, index in enumerate(itertools.product(*(range(e) for e in m.box[::-1]))):
        at = [c + i for c, i in zip(coords, index[::-1], strict=True)]
        inside = all(0 <= c < size for c, size in zip(at, m.dims, strict=True))
        offset = sum(c * stride for c, stride in zip(at, m.strides, strict=True))
        yield position, m.address + offset if inside else None


MAPS = [
    ("f16", (40, 30), (96,), (32, 8), 64),
    ("bf16", (20, 7, 5), (48, 400), (16, 4, 2), 32),
    ("f32", (9, 6, 3, 2), (64, 512, 2048), (8, 3, 2, 1), 0),
    ("u8", (200, 17), (208,), (128, 5), 128),
    ("f16", (16, 4, 3, 2, 2), (32, 128, 512, 1024), (8, 2, 3, 1, 2), 0),
]


@pytest.mark.parametrize(("kind", "dims", "strides", "box", "swizzle"), MAPS)
def test_decodes_what_host_code_encodes(kind, dims, strides, box, swizzle):
    m = tensor_map.decode(encode(0x10000, kind, dims, strides, box, swizzle))
    assert (m.address, m.element.name, m.dims) == (0x10000, kind, dims)
    assert (m.strides, m.box, m.swizzle) == ((m.element.itemsize, *strides), box, swizzle)
    assert m.box_bytes == np.prod(box) * m.element.itemsize


@pytest.mark.parametrize("where", ["inside", "negative", "past the end", "outside"])
@pytest.mark.parametrize(("kind", "dims", "strides", "box", "swizzle"), MAPS)
def test_box_transfers_match_element_loops(kind, dims, strides, box, swizzle, where):
    memory = random_memory()
    m = tensor_map.decode(encode(memory.address, kind, dims, strides, box, swizzle))
    coords = {
        "inside": [0] * len(dims),
        "negative": [-2] + [-1] * (len(dims) - 1),
        "past the end": [d - 1 for d in dims],
        "outside": [0] * (len(dims) - 1) + [-box[-1]],
    }[where]
    itemsize = m.element.itemsize
    dtype = STORAGE[itemsize]
    before = memory.data.copy()
    packed, loaded = tensor_map.load_box(m, coords, memory)
    update = np.random.default_rng(1).integers(0, 256, m.box_bytes, dtype=np.uint8)
    stored = tensor_map.store_box(m, coords, update, memory)

    expected_box = np.zeros(m.box_bytes // itemsize, dtype)
    expected_memory = before.copy()
    count = 0
    for position, address in box_elements(m, coords):
        if address is not None:
            start = address - memory.address
            expected_box[position] = before[start : start + itemsize].view(dtype)[0]
            expected_memory[start : start + itemsize] = update[
                position * itemsize : (position + 1) * itemsize
            ]
            count += itemsize
    assert np.array_equal(packed.view(dtype), expected_box)
    assert np.array_equal(memory.data, expected_memory)
    assert loaded == stored == count


def test_loaded_boxes_are_copies():
    memory = random_memory()
    m = tensor_map.decode(encode(memory.address, "f16", (32, 8), (64,), (32, 8), 0))
    packed, _ = tensor_map.load_box(m, (0, 0), memory)
    packed[:] = 0
    assert memory.data.any()


def test_wrapped_address_of_ragged_maps():
    """(B, D) rows made ragged by a 2**34 stride: row i lands at (offset + i) * stride."""
    memory = random_memory()
    m = tensor_map.decode(
        encode(memory.address, "f16", (32, 64, 1 << 29), (64, (1 << 34) - 64), (32, 8, 1), 0)
    )
    wrapped = m.address + 5 * 64 + 3 * ((1 << 34) - 64)
    assert wrapped % (1 << 34) == memory.address + 2 * 64
    far = ArrayMemory(memory.data, memory.address + 3 * (1 << 34))
    packed, loaded = tensor_map.load_box(m, (0, 5, 3), far)
    assert loaded == m.box_bytes
    assert np.array_equal(packed, memory.data[128 : 128 + m.box_bytes])


class TwoPlaces:
    """Two arrays of memory with nothing between them."""

    def __init__(self, *places: ArrayMemory) -> None:
        self.places = places

    def view(self, addr: int, nbytes: int, write: bool = False) -> np.ndarray:
        try:
            return self.places[0].view(addr, nbytes, write)
        except AddressError:
            return self.places[1].view(addr, nbytes, write)

    def touch_box(self, *box: Any) -> None: ...


@pytest.mark.parametrize("first", [0x10000, 2**64 - 256], ids=["apart", "around 2**64"])
def test_only_touched_rows_must_be_in_memory(first: int) -> None:
    stride = 4096 if first == 0x10000 else 256
    places = [ArrayMemory(np.arange(i, i + 64, dtype=np.uint8), 0) for i in (0, 100)]
    for i, place in enumerate(places):
        place.address = (first + i * stride) % 2**64
    memory = TwoPlaces(*places)
    m = tensor_map.decode(encode(first, "u32", (16, 3), (stride,), (16, 2), 0))
    packed, loaded = tensor_map.load_box(m, (0, 0), memory)
    assert loaded == m.box_bytes == 128
    assert np.array_equal(packed, np.concatenate([p.data for p in places]))
    assert tensor_map.reduce_box(m, (0, 0), packed, memory, "add") == 128
    assert np.array_equal(places[1].data.view(np.uint32), 2 * packed.view(np.uint32)[16:])
    assert tensor_map.store_box(m, (0, -1), packed, memory) == 64
    assert np.array_equal(places[0].data, packed[64:])
    with pytest.raises(AddressError):
        tensor_map.load_box(m, (0, 1), memory)


@pytest.mark.parametrize(
    ("kind", "op"),
    [("f32", "add"), ("bf16", "add"), ("f16", "max"), ("s32", "min"), ("s32", "xor")],
)
def test_reduction_matches_elementwise_arithmetic(kind, op):
    rng = np.random.default_rng(2)
    itemsize = tensor_map.decode(encode(16, kind, (64,), (), (16,), 0)).element.itemsize
    floats = rng.standard_normal((2, 64 * 8)).astype(np.float32)
    if kind == "bf16":
        raw = (floats.view(np.uint32) >> 16).astype(np.uint16)
        values = (raw.astype(np.uint32) << 16).view(np.float32)
    elif kind == "f16":
        raw = floats.astype(np.float16)
        values = raw.astype(np.float32)
    elif kind == "f32":
        raw = values = floats
    else:
        dtype = np.uint8 if kind == "u8" else np.int32
        raw = values = rng.integers(0, 100, (2, 64 * 8)).astype(dtype)
    memory = ArrayMemory(raw[0].copy().view(np.uint8))
    m = tensor_map.decode(encode(memory.address, kind, (64, 8), (64 * itemsize,), (64, 8), 0))
    assert tensor_map.reduce_box(m, (0, 0), raw[1].copy().view(np.uint8), memory, op) == m.box_bytes
    function = {"add": np.add, "max": np.maximum, "min": np.minimum, "xor": np.bitwise_xor}[op]
    expected = function(values[0], values[1])
    if kind == "bf16":
        result = (memory.data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        assert np.abs(result - expected).max() <= np.abs(expected).max() * 2**-8
    else:
        assert np.array_equal(memory.data.view(raw.dtype), expected.astype(raw.dtype))


@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize("offset", [0, 128, 1024, 1024 + 384])
def test_shared_placement_follows_address_bits(swizzle, offset):
    box = ((swizzle or 128) // 2, 12)
    m = tensor_map.decode(encode(0x10000, "f16", (64, 64), (128,), box, swizzle))
    packed = np.random.default_rng(3).integers(0, 256, m.box_bytes, dtype=np.uint8)
    shared = np.full(8192, 0xFF, np.uint8)
    tensor_map.scatter_to_shared(m, packed, shared, BASE + offset, BASE)
    expected = np.full(8192, 0xFF, np.uint8)
    bits = {0: 0, 32: 1, 64: 2, 128: 3}[swizzle]
    for i, value in enumerate(packed):
        logical = BASE + offset + i
        physical = logical ^ (((logical >> 7) & ((1 << bits) - 1)) << 4)
        expected[physical - BASE] = value
    assert np.array_equal(shared, expected)
    assert np.array_equal(tensor_map.gather_from_shared(m, shared, BASE + offset, BASE), packed)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"address": 0x10008}, "0x10008"),
        ({"box": (12, 4)}, "24 bytes"),
        ({"box": (64, 4), "swizzle": 64}, "128 bytes"),
    ],
)
def test_refuses_what_the_hardware_refuses(change, message):
    fields = {"address": 0x10000, "box": (32, 4), "swizzle": 0} | change
    with pytest.raises(InvalidDescriptor, match=message):
        tensor_map.decode(encode(kind="f16", dims=(64, 64), strides=(128,), **fields))


def test_refuses_other_descriptors():
    with pytest.raises(InvalidDescriptor, match="control word"):
        tensor_map.decode(b"\xff" * 128)
    with pytest.raises(InvalidDescriptor, match="64 are needed"):
        tensor_map.decode(b"")
    m = tensor_map.decode(encode(0x10000, "f16", (64, 64), (128,), (32, 4), 0))
    with pytest.raises(InvalidDescriptor, match="3 coordinates"):
        tensor_map.load_box(m, (0, 0, 0), random_memory())
    with pytest.raises(InvalidDescriptor, match="128-byte"):
        tensor_map.gather_from_shared(m, np.zeros(4096, np.uint8), BASE + 16, BASE)
